"""Rows that no device can have measured: in another unit, or damaged. They are refused before they price anything.

    seconds / roofline in [1 / 10, 1,000] on GPUs, [1 / 100, 10,000] on processors

with roofline = max(FLOPs / peak, bytes / memory bandwidth) + launch. Of 24,000 public products on A100, H100, H200 and
L40S the ratio is 0.34 (a cache that holds all) to 233, of 2,204 ops of one Xeon 0.26 to 131; the shipped description of
a processor may be another's by an order of magnitude. A unit that is wrong is so by 1,000 at least, so that rows near
the roofline give it away; small ones, which a launch rules, may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cost.kernels import is_tiled
from meshwright.cost.roofline import LAUNCH_S
from meshwright.cost.work import read_work
from meshwright.records.table import parse_sizes
from meshwright.spec import MeasurementError, format_seconds
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.records import Records
    from meshwright.spec import Cluster, DeviceKind

_ON_GPUS = (0.1, 1e3)
_ON_PROCESSORS = (0.01, 1e4)


def refuse_impossible(rows: Records, cluster: Cluster) -> None:
    """Raise MeasurementError for products and captured ops that are far from what a device of the cluster can do."""
    kinds = {kind.name: kind for kind in cluster.device_kinds}
    columns = zip(rows.device, rows.op, rows.phase, rows.shapes, rows.dtype, rows.seconds.tolist(), strict=True)
    for device, op, phase, shapes, dtype, seconds in columns:
        if device not in kinds or phase not in ("", "forward") or seconds <= 0:
            continue
        amount = _amount(op, shapes, dtype)
        if amount is None:
            continue
        kind = kinds[device]
        expected = _roofline(kind, dtype, *amount)
        low, high = _ON_GPUS if is_tiled(kind) else _ON_PROCESSORS
        if not low <= seconds / expected <= high:
            raise MeasurementError(
                f"{op} {shapes[:100]} takes {format_seconds(seconds)} on {device} by the table; expected about "
                f"{format_seconds(expected)} by the datasheet, and no measurement is so far from it. Check the unit of "
                "the table (seconds), or leave the row out."
            )


def _amount(op: str, shapes: str, dtype: str) -> tuple[float, float] | None:
    """FLOPs and bytes of a forward; None for rows that do not say what is computed."""
    if op == "matmul":
        sizes = parse_sizes(shapes) or {}
        if not {"m", "n", "k"} <= sizes.keys():
            return None
        m, n, k = (float(sizes[name]) for name in ("m", "n", "k"))
        return 2.0 * m * n * k, DTYPE_BYTES.get(dtype.partition(":")[0], 1) * (m * k + n * k + m * n)
    work = read_work(f"{op}({shapes})") if "|" in shapes else None
    return None if work is None else (work.forward.flops, work.forward.num_bytes)


def _roofline(kind: DeviceKind, dtype: str, flops: float, num_bytes: float) -> float:
    peak = kind.peak_flops_per_s.get(dtype.partition(":")[0]) or max(kind.peak_flops_per_s.values())
    return max(flops / peak, num_bytes / kind.memory_bandwidth_bytes_per_s) + LAUNCH_S
