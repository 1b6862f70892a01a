"""A cost model for a cluster from a file of measurements: ops, optimizers and transfers, and the collectives fitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cost.collectives import CollectiveModel, fit_collectives
from meshwright.cost.collectives.fitting import collective_rows
from meshwright.cost.model import CostModel
from meshwright.records import from_measurements, load_measurements, read_records_at

if TYPE_CHECKING:
    from meshwright.records import Records
    from meshwright.spec import Cluster
    from meshwright.spec.workload import Precision


def load_cost_model(cluster: Cluster, path: Path | str | None, precision: Precision) -> CostModel:
    """Prices for a cluster from its rows of a file (``.json`` or ``.parquet``), or without a file by datasheet.

    Raises DocumentError for a file that cannot be read, MeasurementError if it has no row of the cluster's devices.
    """
    if path is None:
        return CostModel(cluster=cluster, precision=precision)
    measured = load_measurements(path, cluster)
    many = Path(path).suffix == ".parquet"
    rows = read_records_at(Path(path)).where(device=measured.device) if many else from_measurements(measured)
    return CostModel(cluster=cluster, measurements=measured, precision=precision, collectives=_fit_if_measured(rows))


def _fit_if_measured(rows: Records) -> CollectiveModel | None:
    """The collectives among the rows, the latest of each; None if there are none."""
    usable = collective_rows(rows.dedupe(("op", "phase", "shapes", "dtype")))
    return fit_collectives(usable) if len(usable) else None
