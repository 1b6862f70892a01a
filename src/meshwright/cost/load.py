"""A cost model for a cluster from a file of measurements: ops, optimizers, transfers, collectives, kernels."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cost.collectives.fitting import fit_measured
from meshwright.cost.kernels import adapt_kernels, is_tiled, shipped_model
from meshwright.cost.model import CostModel
from meshwright.cost.plausible import refuse_impossible
from meshwright.cost.software import PYTORCH, Software
from meshwright.cost.traced import collect_traced
from meshwright.records import from_measurements, load_measurements, read_records_at
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from meshwright.cost.kernels import KernelModel
    from meshwright.records import Records
    from meshwright.spec import Cluster, Measurements
    from meshwright.spec.precision import Precision


def load_cost_model(
    cluster: Cluster, path: Path | str | None, precision: Precision, software: Software = PYTORCH
) -> CostModel:
    """Prices for a cluster from its rows of a file (``.json`` or ``.parquet``), or without a file by datasheet.

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
