"""A cost model for a cluster from a file of measurements: ops, optimizers, transfers, collectives, kernels."""

from __future__ import annotations

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
    from meshwright.spec import Cluster
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


def _adapt_if_measured(rows: Records, cluster: Cluster) -> KernelModel | None:
    """The shipped predictor of kernels moved by those among the rows; None if there are none that it has not seen."""
    kinds = {kind.name: kind for kind in cluster.device_kinds if is_tiled(kind)}
    if not kinds:
        return None
    adapted = adapt_kernels(shipped_model(), rows.dedupe(), kinds)
    return adapted if adapted is not shipped_model() else None
