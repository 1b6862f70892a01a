"""Fit a `CollectiveModel` to rows of the measurement table: curves over sizes (`kriging`), errors of held-out rows.

These rows are not used: sizes that move no bytes (flag ``noop``), points that the source raised to a neighbour's rate
(flag ``plateau``), groups of one rank, and zero seconds. Rows of phase ``host`` (CPU seconds of a transfer) are fitted
separately, on request.

The error ``interpolated`` comes from leaving each inner size out of the kriging. ``moved_inside`` and ``moved_across``
(groups inside a node and across nodes) come from predicting each group from the other groups; the logarithm of the
error is divided by √h (`fitted`). γ is fitted to all groups, because one of two groups alone does not determine it. All
sizes of a group err in the same direction, and measured groups are few. So the interval of a transfer is symmetric.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives.algorithms import COLLECTIVE_OPS, CollectiveOp, Topology
from meshwright.cost.collectives.collective_groups import CollectiveGroup, group_in_mesh
from meshwright.cost.collectives.fitted import (
    CollectiveModel,
    ErrorScale,
    MeasuredPlace,
    comparable,
    latency_exponent,
    list_places,
    transfer,
)
from meshwright.cost.collectives.kriging import draw_series
from meshwright.cost.costs import Floats, Interval, fit_interval
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.records import Records

# The error without any data: a factor of two, the range within which rules of thumb for NCCL agree with measurements of
# other versions (constants of src/graph/tuning.cc differ by up to that between versions).
UNKNOWN = Interval(low=0.5, high=2.0)
# The fewest residuals for quantiles at 10 and 90 %.
_FEWEST = 10


def fit_collectives(rows: Records, topology: Topology | None = None, *, phase: str = "") -> CollectiveModel:
    """Return a model fitted to the measured collectives of one cluster.

    ``topology``: the links of a node if they differ between pairs of devices. ``phase``: "" for seconds, "host" for CPU
    seconds. Raises MeasurementError for rows of several devices, and if no row is a usable collective.
    """
    usable = collective_rows(rows, phase)
    devices = sorted(set(usable.device))
    if len(devices) != 1:
        raise MeasurementError(
            f"The measurements contain {len(usable)} usable rows of collectives, of devices "
            f"{', '.join(devices) or 'none'}; expected at least one row, all of the same device. Select the rows of "
            "one device."
        )
    groups = groups_of(usable)
    series, left_out = draw_series(usable, groups)
    places = {op: list_places(one for one in series if one.op == op) for op in sorted(set(usable.op))}
    latency_s = {(op, place.group): place.latency_s for op, alike in places.items() for place in alike}
    judged = np.flatnonzero(np.isfinite(left_out))
    inner = [
        (usable.seconds[[row]], left_out[[row]], 1.0, latency_s[usable.op[row], groups[row]]) for row in judged.tolist()
    ]
    moved = {
        across: [
            part
            for op, alike in places.items()
            for place in alike
            if (place.group.num_nodes > 1) == across
            and (part := _left_out_place(op, place, alike, topology)) is not None
        ]
        for across in (False, True)
    }
    return CollectiveModel(
        device=devices[0],
        series=series,
        interpolated=_scale(inner),
        moved_inside=_scale(moved[False], symmetric=True),
        moved_across=_scale(moved[True], symmetric=True),
        topology=topology,
        row_hashes=tuple(f"{value:016x}" for value in usable.row_hashes().tolist()),
    )


def fit_latest(rows: Records, phase: str = "") -> CollectiveModel | None:
    """Return a model fitted to the latest rows of one device, of seconds or (``phase`` "host") of CPU seconds.

    The result is None without usable rows.
    """
    latest = rows.dedupe(("op", "phase", "shapes", "dtype"))
    return fit_collectives(latest, phase=phase) if len(collective_rows(latest, phase)) else None


def collective_rows(rows: Records, phase: str = "") -> Records:
    """Return the usable rows of collectives among at least two ranks; ``phase``: "" for seconds, "host" for the CPU."""
    ours = rows.select(np.isin(rows.op, COLLECTIVE_OPS) & (rows.phase == phase))
    if not len(ours):
        return ours
    flagged = ours.has_flag("noop") | ours.has_flag("plateau")
    return ours.select(~flagged & (ours.seconds > 0) & (ours.size("ranks") > 1))


def groups_of(rows: Records) -> list[CollectiveGroup]:
    """Return the `CollectiveGroup` of each row, from the row's sizes of its mesh."""
    columns = (rows.size(name).tolist() for name in ("ranks", "stride", "devices_per_node", "groups", "nodes"))
    return [group_in_mesh(*sizes) for sizes in zip(*columns, strict=True)]


def _left_out_place(
    op: CollectiveOp, place: MeasuredPlace, known: Sequence[MeasuredPlace], topology: Topology | None
) -> tuple[Floats, Floats, float, float] | None:
    """Return (measured, predicted, √h, latency) at a place's sizes from the op's other places; None without any."""
    alike = comparable(known, place.group)
    others = [other for other in alike if other.group != place.group]
    sizes = np.array(sorted(place.measured))
    moved = transfer(op, place.group, sizes, others, latency_exponent(alike), topology)
    if moved is None:
        return None
    return place.at(sizes), moved.seconds, sqrt(moved.octaves), moved.latency_s


def _scale(parts: Sequence[tuple[Floats, Floats, float, float]], *, symmetric: bool = False) -> ErrorScale:
    """Return the error scale of (measured, predicted, √h, latency) parts by regime; ``symmetric`` ignores signs."""
    regimes: tuple[list[Floats], list[Floats]] = ([np.empty(0)], [np.empty(0)])
    for measured, predicted, stretch, latency_s in parts:
        if stretch > 0:
            logs = np.log(measured / predicted) / stretch
            in_latency: NDArray[np.bool_] = latency_s > predicted / 2
            for regime, mine in zip(regimes, (logs[in_latency], logs[~in_latency]), strict=True):
                regime.extend([mine, -mine] if symmetric else [mine])
    latency, bandwidth = (np.concatenate(logs) for logs in regimes)
    fitted = [_interval(logs) if len(logs) >= _FEWEST else None for logs in (latency, bandwidth)]
    return ErrorScale(latency=fitted[0] or fitted[1] or UNKNOWN, bandwidth=fitted[1] or fitted[0] or UNKNOWN)


def _interval(logs: Floats) -> Interval:
    found = fit_interval(np.exp(logs), np.ones(len(logs)))
    return replace(found, low=min(found.low, 1.0), high=max(found.high, 1.0))
