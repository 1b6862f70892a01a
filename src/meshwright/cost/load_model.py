"""Load a cost model for a cluster from a file of measurements: ops, optimizers, transfers, collectives, kernels.

`refuse_impossible` raises an error for impossible rows, which are due to a wrong unit or to damage. The expected range
is

    seconds / roofline in [1 / 10, 1,000] on GPUs, [1 / 100, 10,000] on CPUs

with roofline = max(FLOPs / peak, bytes / memory bandwidth) + launch. For 24,000 public products on A100, H100, H200 and
L40S the ratio is 0.34 (everything in cache) to 233; for 2,204 ops on one Xeon it is 0.26 to 131. The shipped figures of
a CPU may be wrong by an order of magnitude for another CPU. A wrong unit changes times by a factor of at least 1,000,
which is detected for rows near the roofline, but not always for small ops, whose time is mostly launches.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cost.collectives.uneven_links import fit_links
from meshwright.cost.cost_model import CostModel
from meshwright.cost.kernels import KernelModel, adapt_kernels, is_tiled, shipped_model
from meshwright.cost.op_estimates import collect_traced
from meshwright.cost.roofline import LAUNCH_S
from meshwright.cost.software import PYTORCH, Software
from meshwright.cost.work import read_work
from meshwright.records import Records, from_measurements, load_measurements, read_records_at
from meshwright.records.record_table import parse_sizes
from meshwright.spec import DTYPE_BYTES, Cluster, DeviceKind, MeasurementError, Measurements, format_seconds

if TYPE_CHECKING:
    from meshwright.spec.precision import Precision


def load_cost_model(
    cluster: Cluster, path: Path | str | None, precision: Precision, software: Software = PYTORCH
) -> CostModel:
    """Return a cost model for a cluster, with the measurements of a file (``.json`` or ``.parquet``).

    Without a ``path`` (None), all costs come from datasheets and shipped models. Raises DocumentError for an unreadable
    file. Raises MeasurementError if the file has no row of the cluster's devices, contradictory rows, or impossible
    ones.
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
            f"{path}: {len(twice)} rows contradict another row of the table: same measurement, different seconds (the "
            f"first: {here.op[first]} {here.shapes[first][:100]}). Keep the right one of each."
        )
    refuse_impossible(here, cluster)
    own, host = fit_links(here, cluster)
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
    """Raise MeasurementError if the device of a measurement table is not among the cluster's device kinds."""
    kinds = {kind.usual_name for kind in map(cluster.device_kind, range(cluster.num_ranks))}
    if measured.device not in kinds:
        raise MeasurementError(
            f"{path} was measured on {measured.device} ({measured.software}); the devices of cluster {cluster.name!r} "
            f"are {', '.join(sorted(kinds))}. Measure on that cluster (`meshwright measure`), or leave --measurements "
            "out."
        )


def other_torch(measured: Measurements | None) -> str:
    """Return a warning if a table was measured with a version of torch other than the installed one, else ""."""
    found = re.search(r"torch (\S+?),", f"{measured.software}," if measured is not None else "")
    try:
        here = version("torch")
    except PackageNotFoundError:
        return ""
    if found is None or measured is None or found[1].split("+")[0] == here.split("+")[0]:
        return ""
    return (
        f"The measurements were taken with torch {found[1]} on {measured.device}; the installed torch is {here}. Ops "
        "may take different times in another version: measure again with the torch that will run."
    )


def _adapt_if_measured(rows: Records, cluster: Cluster) -> KernelModel | None:
    """Return the shipped kernel predictor adapted to new kernels among the rows; None if nothing is new."""
    kinds = {kind.name: kind for kind in cluster.device_kinds if is_tiled(kind)}
    if not kinds:
        return None
    adapted = adapt_kernels(shipped_model(), rows.dedupe(), kinds)
    return adapted if adapted is not shipped_model() else None


_ON_GPUS = (0.1, 1e3)
_ON_PROCESSORS = (0.01, 1e4)


def refuse_impossible(rows: Records, cluster: Cluster) -> None:
    """Raise MeasurementError for a product or captured op whose time is impossible on its device (see the module)."""
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
                f"{op} {shapes[:100]} takes {format_seconds(seconds)} on {device} by the measurement table; expected "
                f"about {format_seconds(expected)} by the datasheet. No real measurement differs this much. Check the "
                "unit of the table (seconds), or leave the row out."
            )


def _amount(op: str, shapes: str, dtype: str) -> tuple[float, float] | None:
    """Return FLOPs and bytes of a forward; None for rows that do not describe the computation."""
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
