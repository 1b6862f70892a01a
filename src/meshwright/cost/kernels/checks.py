"""What the predictor of kernels may be asked: which devices, dtypes and sizes a kernel can have.

device   states multiprocessors, cache and clock
dtype    arithmetic at a rate that the datasheet states (no float8 without one), keys and values of a known width
sizes    1 ≤ size ≤ 2⁴⁰; a window may be 0, which is none; query heads are at least as many as those of keys
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec import MeasurementError
from meshwright.spec.units import ARITHMETIC_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    from meshwright.cost.prediction import Floats
    from meshwright.spec import DeviceKind

# By op, the sizes that a query has.
SIZES: dict[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "attention_prefill": ("batch", "heads", "kv_heads", "head_dim", "queries", "keys", "window"),
    "attention_decode": ("batch", "heads", "kv_heads", "head_dim", "queries", "keys", "window"),
}
# At a byte each, so many elements are a terabyte: more than the memory of any device.
MAX_SIZE = 2**40
# Sizes that may be left out, with their value then.
_OPTIONAL = {"matmul": {"count": 1.0}}


def is_tiled(device: DeviceKind) -> bool:
    """Whether a datasheet says what kernels are predicted by: multiprocessors, cache and clock."""
    return bool(device.num_multiprocessors and device.cache_bytes and device.clock_hz)


def split_dtype(dtype: str) -> tuple[str, str]:
    """(arithmetic, keys and values) of a record's dtype: ``bfloat16:kv=float8_e4m3fn``; scaling is no dtype."""
    first, _, rest = dtype.partition(":")
    return first, rest.removeprefix("kv=") if rest.startswith("kv=") else first


def has_rate(device: DeviceKind, dtype: str) -> bool:
    """Whether the device calculates in a record's dtype, as far as its datasheet says, and its values have a width."""
    arithmetic, values = split_dtype(dtype)
    return arithmetic in ARITHMETIC_BYTES.keys() & device.peak_flops_per_s.keys() and values in ARITHMETIC_BYTES


def check_device(device: DeviceKind, dtype: str) -> None:
    """Raises MeasurementError for a device that is not described well enough to predict kernels of this dtype on it."""
    if not is_tiled(device):
        raise MeasurementError(
            f"The datasheet of {device.name!r} states no multiprocessors, cache or clock; kernels on it are not "
            "predicted. State num_multiprocessors, cache_bytes and clock_hz of the device kind."
        )
    if not has_rate(device, dtype):
        known = ", ".join(sorted(ARITHMETIC_BYTES.keys() & device.peak_flops_per_s.keys())) or "none"
        raise MeasurementError(
            f"Kernels in {dtype!r} on {device.name!r}: expected a floating-point dtype that its datasheet states a "
            f"rate of ({known}). Ask for one of these, or state the rate in peak_flops_per_s of the device kind."
        )


def wrong_sizes(columns: Mapping[str, Floats]) -> dict[str, NDArray[np.bool_]]:
    """By size, which queries cannot be (each of shape (queries,)); ``columns``: the sizes of an op in `SIZES`."""
    wrong = {
        name: ~((column >= (0 if name == "window" else 1)) & (column <= MAX_SIZE)) for name, column in columns.items()
    }
    if "kv_heads" in columns:
        wrong["kv_heads"] |= columns["kv_heads"] > columns["heads"]
    return wrong


def check_sizes(op: str, sizes: Mapping[str, ArrayLike]) -> dict[str, Floats]:
    """The sizes of n queries as columns of shape (n,), one number standing for all. ``op`` is one of `SIZES`.

    Raises MeasurementError for sizes that are missing, unknown, no numbers, of unequal length, or cannot be.
    """
    names, optional = SIZES[op], _OPTIONAL.get(op, {})
    missing, unknown = [name for name in names if name not in sizes], set(sizes) - {*names, *optional}
    if missing or unknown:
        said = ", ".join(missing) or "unknown " + ", ".join(sorted(unknown))
        raise MeasurementError(f"{op}: {'no sizes ' if missing else ''}{said}; expected {', '.join(names)}.")
    columns = _broadcast(op, {name: np.asarray(column) for name, column in (optional | dict(sizes)).items()})
    for name, wrong in wrong_sizes(columns).items():
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise MeasurementError(
                f"{op}: {name} is {columns[name][place]:g} in query {place}; expected a positive number up to "
                f"{MAX_SIZE}" + (", and at most as many as heads." if name == "kv_heads" else ".")
            )
    return columns


def _broadcast(op: str, given: dict[str, NDArray[np.generic]]) -> dict[str, Floats]:
    lengths = {len(column) for column in given.values() if column.ndim}
    for name, column in given.items():
        if not (column.dtype.kind in "iuf" or not column.size) or column.ndim > 1:
            raise MeasurementError(
                f"{op}: {name} is of dtype {column.dtype} and shape {column.shape}; expected a number or one per query."
            )
    if len(lengths - {1}) > 1:
        raise MeasurementError(
            f"{op}: sizes of {', '.join(map(str, sorted(lengths)))} queries; expected one number for each query, or "
            "one for all."
        )
    count = (lengths - {1} or {1}).pop()
    # Compiled loops want columns that lie in one piece.
    return {
        name: np.ascontiguousarray(np.broadcast_to(column.astype(np.float64), count)) for name, column in given.items()
    }
