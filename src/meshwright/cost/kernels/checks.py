"""Valid queries of the kernel predictor: devices, dtypes and sizes.

- device: states multiprocessors, cache and clock
- dtype: arithmetic at a rate that the datasheet states (no float8 without one), keys and values of a known width
- sizes: 1 ≤ size ≤ 2⁴⁰; a window may be 0 (no window); query heads are at least as many as heads of keys
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

# The sizes of a query, by op.
SIZES: dict[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "attention_prefill": ("batch", "heads", "kv_heads", "head_dim", "queries", "keys", "window"),
    "attention_decode": ("batch", "heads", "kv_heads", "head_dim", "queries", "keys", "window"),
}
# At a byte each, this number of elements is a terabyte: more than the memory of any device.
MAX_SIZE = 2**40
# Optional sizes with their defaults.
_OPTIONAL = {"matmul": {"count": 1.0}}


def is_tiled(device: DeviceKind) -> bool:
    """Return whether a datasheet has the figures for kernel predictions: multiprocessors, cache and clock."""
    return bool(device.num_multiprocessors and device.cache_bytes and device.clock_hz)


def split_dtype(dtype: str) -> tuple[str, str]:
    """Return (arithmetic, keys and values) of a record's dtype, such as ``bfloat16:kv=float8_e4m3fn``.

    Scaling is not part of the dtype.
    """
    first, _, rest = dtype.partition(":")
    return first, rest.removeprefix("kv=") if rest.startswith("kv=") else first


def has_rate(device: DeviceKind, dtype: str) -> bool:
    """Return whether the datasheet states a rate for a record's dtype, and its values have a known width."""
    arithmetic, values = split_dtype(dtype)
    return arithmetic in ARITHMETIC_BYTES.keys() & device.peak_flops_per_s.keys() and values in ARITHMETIC_BYTES


def check_device(device: DeviceKind, dtype: str) -> None:
    """Raise MeasurementError if a device's description does not suffice to predict kernels of this dtype."""
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
    """Return, by size, which queries are invalid (each of shape (queries,)); ``columns``: sizes of an op in `SIZES`."""
    wrong = {
        name: ~((column >= (0 if name == "window" else 1)) & (column <= MAX_SIZE)) for name, column in columns.items()
    }
    if "kv_heads" in columns:
        wrong["kv_heads"] |= columns["kv_heads"] > columns["heads"]
    return wrong


def check_sizes(op: str, sizes: Mapping[str, ArrayLike]) -> dict[str, Floats]:
    """Return the sizes of n queries as columns of shape (n,); a single number is repeated. ``op`` is one of `SIZES`.

    Raises MeasurementError for missing, unknown or invalid sizes, for values that are not numbers, and for unequal
    lengths.
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
    # Compiled loops need contiguous columns.
    return {
        name: np.ascontiguousarray(np.broadcast_to(column.astype(np.float64), count)) for name, column in given.items()
    }
