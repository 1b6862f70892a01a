"""What a fitted model says of measured rows of a collective, as a user would ask for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives.fitting import groups_of
from meshwright.cost.prediction import Predictions
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from meshwright.cost.collectives import CollectiveModel
    from meshwright.cost.prediction import Basis
    from meshwright.records import Records


def predict_rows(model: CollectiveModel, rows: Records, *, placed_only: bool = False) -> Predictions:
    """Predictions of rows of one op, in their order; with ``placed_only`` neither dtype nor groups at once are told.

    Raises MeasurementError where nothing comparable was measured.
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
                f"No measured group is like {group} for {rows.op[0]}; measure one that crosses nodes."
            )
        seconds[mine], low_s[mine], high_s[mine] = found.seconds, found.low_s, found.high_s
        for row, name in zip(mine.tolist(), found.basis, strict=True):
            basis[row] = name
    return Predictions(seconds=seconds, low_s=low_s, high_s=high_s, basis=tuple(basis))
