"""Rows of measured collectives: the table of each row, and the predictions of a fitted model for rows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives import CollectiveModel, Topology, load_topology
from meshwright.cost.collectives.fitting import groups_of
from meshwright.cost.costs import Floats, Interval, Predictions, fit_interval
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwright.cost import Basis
    from meshwright.records import Records


def table_of(rows: Records, index: int) -> tuple[str, str, str]:
    """Return what identifies a row's table: (device, version of NCCL, file); the file is "" for vTrain's tables."""
    source = rows.source[index]
    return rows.device[index], rows.software[index], "" if "vTrain" in source else source


def topology_of(device: str) -> Topology | None:
    """Return the links inside the measured nodes of a kind of device; None if all pairs of devices have equal links."""
    return load_topology("dgx1-v100") if device == "V100" else None


def digest_rows(*tables: Records) -> str:
    """Return the SHA-256 of the rows of all tables, independent of their order."""
    hashes = np.sort(np.concatenate([rows.row_hashes() for rows in tables]))
    return hashlib.sha256(hashes.astype("<u8").tobytes()).hexdigest()


def fit_alike(ratios: Iterable[Floats]) -> Interval:
    """Return the 80 % interval of measured / predicted, in which every kind of device has the same weight.

    ``ratios``: for each kind of device, measured / predicted of its rows, shape (rows,). Each kind counts by its
    percentiles, however many rows it has. The interval always includes 1.
    """
    pooled = np.concatenate([np.percentile(mine, range(1, 100)) for mine in ratios])
    found = fit_interval(pooled, np.ones(len(pooled)))
    return Interval(low=min(found.low, 1.0), high=max(found.high, 1.0))


def predict_rows(model: CollectiveModel, rows: Records, *, placed_only: bool = False) -> Predictions:
    """Return the model's predictions of rows of one op, in their order.

    With ``placed_only`` the model receives neither the dtype nor the number of concurrent groups. Raises
    MeasurementError if no comparable group was measured.
    """
    sizes = rows.size("bytes").astype(np.float64)
    places = list(zip(groups_of(rows), rows.dtype, rows.size("groups").tolist(), strict=True))
    seconds, low_s, high_s = (np.empty(len(rows)) for _ in range(3))
    basis: list[Basis] = ["measured"] * len(rows)
    for place in dict.fromkeys(places):
        group, dtype, num_groups = place
        mine = np.flatnonzero([other == place for other in places])
        told = {} if placed_only else {"dtype": dtype, "num_groups": num_groups}
        found = model.predict(rows.op[0], group, sizes[mine], **told)
        if found is None:
            raise MeasurementError(
                f"No measured group is comparable to {group} for {rows.op[0]}; measure a group that crosses nodes."
            )
        seconds[mine], low_s[mine], high_s[mine] = found.seconds, found.low_s, found.high_s
        for row, name in zip(mine.tolist(), found.basis, strict=True):
            basis[row] = name
    return Predictions(seconds=seconds, low_s=low_s, high_s=high_s, basis=tuple(basis))
