"""A cost model for a cluster from a file of measurements: ops, optimizers, transfers, collectives, kernels.

`refuse_impossible` refuses rows that no device can have measured, in another unit or damaged. Expected is

    seconds / roofline in [1 / 10, 1,000] on GPUs, [1 / 100, 10,000] on processors

with roofline = max(FLOPs / peak, bytes / memory bandwidth) + launch. Of 24,000 public products on A100, H100, H200 and
L40S the ratio is 0.34 (a cache that holds all) to 233, of 2,204 ops of one Xeon 0.26 to 131; the shipped description of
a processor may be another's by an order of magnitude. A unit that is wrong is so by 1,000 at least, so that rows near
the roofline give it away; small ones, which a launch rules, may not.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cost.collectives.fitting import fit_measured
from meshwright.cost.kernels import adapt_kernels, is_tiled, shipped_model
from meshwright.cost.model import CostModel
from meshwright.cost.roofline import LAUNCH_S
from meshwright.cost.software import PYTORCH, Software
from meshwright.cost.traced import collect_traced
from meshwright.cost.work import read_work
from meshwright.records import from_measurements, load_measurements, read_records_at
from meshwright.records.table import parse_sizes
from meshwright.spec import MeasurementError, format_seconds
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.cost.kernels import KernelModel
    from meshwright.records import Records
    from meshwright.spec import Cluster, DeviceKind, Measurements
    from meshwright.spec.precision import Precision


def load_cost_model(
    cluster: Cluster, path: Path | str | None, precision: Precision, software: Software = PYTORCH
) -> CostModel:
    """Costs for a cluster from its rows of a file (``.json`` or ``.parquet``), or without a file by datasheet.

    Raises DocumentError for a file that cannot be read, MeasurementError if it has no row of the cluster's devices.
    """
    if path is None:
        return CostModel(cluster=cluster, precision=precision, software=software)
    measured = load_measurements(path, cluster)
    refuse_other_devices(measured, cluster, path)
    rows = read_records_at(Path(path)) if Path(path).suffix == ".parquet" else from_measurements(measured)
    here = rows.where(device=measured.device)
    if len(twice := here.contradictions()):
        first = int(twice[0])
        raise MeasurementError(
            f"{path}: {len(twice)} rows measure what another row of the table measured, with other seconds (the first: "
            f"{here.op[first]} {here.shapes[first][:100]}). Keep one of each; which one holds, nobody can tell."
        )
    refuse_impossible(here, cluster)
    own, host = fit_measured(here)
    return CostModel(
        cluster=cluster,
        measurements=measured,
        precision=precision,
        software=software,
        collectives=own,
        collective_hosts=host,
        kernels=_adapt_if_measured(rows, cluster),
        traced=collect_traced(here) or None,
    )


def refuse_other_devices(measured: Measurements, cluster: Cluster, path: Path | str) -> None:
    """Raise MeasurementError if a table was taken on none of the cluster's kinds of devices."""
    kinds = {kind.usual_name for kind in map(cluster.device_kind, range(cluster.num_ranks))}
    if measured.device not in kinds:
        raise MeasurementError(
            f"{path} was taken on {measured.device} ({measured.software}); the devices of {cluster.name!r} are "
            f"{', '.join(sorted(kinds))}. Measure there (`meshwright measure`), or leave --measurements out."
        )


def other_torch(measured: Measurements | None) -> str:
    """A sentence where a table was taken with another version of torch than the one that is installed; else nothing."""
    found = re.search(r"torch (\S+?),", f"{measured.software}," if measured is not None else "")
    try:
        here = version("torch")
    except PackageNotFoundError:
        return ""
    if found is None or measured is None or found[1].split("+")[0] == here.split("+")[0]:
        return ""
    return (
        f"The measurements were taken with torch {found[1]} on {measured.device}; torch here is {here}. Ops of another "
        "version may take other times: measure again with the torch that will run."
    )


def _adapt_if_measured(rows: Records, cluster: Cluster) -> KernelModel | None:
    """The shipped predictor of kernels moved by those among the rows; None if there are none that it has not seen."""
    kinds = {kind.name: kind for kind in cluster.device_kinds if is_tiled(kind)}
    if not kinds:
        return None
    adapted = adapt_kernels(shipped_model(), rows.dedupe(), kinds)
    return adapted if adapted is not shipped_model() else None


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
