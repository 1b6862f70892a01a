"""From rows of the measurement table to a `CollectiveModel`: one series per op and place, errors from rows left out.

Dtypes and repetitions of one op in one place are averaged per size. Not used: sizes at which nothing is done, points
that the source raised to a neighbour's rate (flags ``noop``, ``plateau``), groups of one rank, zero seconds, the host's
share of a transfer (phase ``host``).

Errors: `interpolated` from leaving each inner size out of its series (its neighbours answer), with the spread of the
repetitions in them; ``moved_inside`` and ``moved_across`` (nodes) from predicting each series from those of the other
places, over √h (`fitted`); only γ is that of all places, since where two are known one alone says nothing of it. Sizes
of a place err in one direction and places are few, so a transfer's interval is symmetric.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives.algorithms import COLLECTIVE_OPS
from meshwright.cost.collectives.fitted import (
    CollectiveModel,
    ErrorScale,
    Series,
    comparable,
    latency_exponent,
    transfer,
)
from meshwright.cost.collectives.groups import Group, group_in_mesh
from meshwright.cost.curves import fit_curve
from meshwright.cost.prediction import Interval, fit_interval
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.cost.collectives.topologies import Topology
    from meshwright.cost.prediction import Floats
    from meshwright.records import Records

# Before anything is known of an error: a factor of two, the range within which rules of thumb for NCCL agree with
# measurements of other versions (constants of src/graph/tuning.cc between versions differ by up to that).
UNKNOWN = Interval(low=0.5, high=2.0)
# Fewer residuals than this say nothing about quantiles at 10 and 90 %.
_FEWEST = 10


def fit_collectives(rows: Records, topology: Topology | None = None) -> CollectiveModel:
    """Fit the collectives of one cluster. ``topology``: the links of its nodes where they differ from pair to pair.

    Raises MeasurementError for rows of several devices, and if no row is a collective that can be used.
    """
    usable = collective_rows(rows)
    devices = sorted(set(usable.device))
    if len(devices) != 1:
        raise MeasurementError(
            f"{len(usable)} usable rows of collectives, of devices {', '.join(devices) or 'none'}; expected some, of "
            "one device. Select its rows."
        )
    groups = groups_of(usable)
    sizes = usable.size("bytes").astype(np.float64)
    places: dict[tuple[str, Group], list[int]] = {}
    for index, (op, group) in enumerate(zip(usable.op, groups, strict=True)):
        places.setdefault((op, group), []).append(index)
    series = []
    for (op, group), members in places.items():
        curve = fit_curve((sizes[index], usable.seconds[index]) for index in members)
        series.append(
            Series(op=op, group=group, sizes=tuple(curve.sizes.tolist()), seconds=tuple(curve.seconds.tolist()))  # type: ignore[arg-type]
        )
    inner = [_left_out_sizes(sizes[members], usable.seconds[members]) for members in places.values()]
    moved = {
        across: [
            part
            for one in series
            if (one.group.num_nodes > 1) == across and (part := _left_out_place(one, series, topology)) is not None
        ]
        for across in (False, True)
    }
    return CollectiveModel(
        device=devices[0],
        series=tuple(series),
        interpolated=_scale([(*part, 1.0, one.latency_s) for part, one in zip(inner, series, strict=True)]),
        moved_inside=_scale(moved[False], symmetric=True),
        moved_across=_scale(moved[True], symmetric=True),
        topology=topology,
        row_hashes=tuple(f"{value:016x}" for value in usable.row_hashes().tolist()),
    )


def collective_rows(rows: Records) -> Records:
    """The rows that are collectives of at least two ranks and say what they seem to."""
    ours = rows.select(np.isin(rows.op, COLLECTIVE_OPS) & (rows.phase == ""))
    if not len(ours):
        return ours
    flagged = ours.has_flag("noop") | ours.has_flag("plateau")
    return ours.select(~flagged & (ours.seconds > 0) & (ours.size("ranks") > 1))


def groups_of(rows: Records) -> list[Group]:
    """The place of each row's group in its mesh."""
    columns = (rows.size(name).tolist() for name in ("ranks", "stride", "devices_per_node", "groups", "nodes"))
    return [group_in_mesh(*sizes) for sizes in zip(*columns, strict=True)]


def _left_out_sizes(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """(measured, predicted) of every row whose size lies inside its series: on the line between the sizes beside it."""
    distinct, place, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    means = np.bincount(place, weights=seconds) / counts
    if len(distinct) < 3:
        return np.empty(0), np.empty(0)
    along = (distinct[1:-1] - distinct[:-2]) / (distinct[2:] - distinct[:-2])
    between = np.concatenate([[np.nan], means[:-2] + along * (means[2:] - means[:-2]), [np.nan]])[place]
    inside = np.isfinite(between)
    return seconds[inside], between[inside]


def _left_out_place(
    one: Series, series: Sequence[Series], topology: Topology | None
) -> tuple[Floats, Floats, float, float] | None:
    """(measured, predicted, √h, latency) of a series from those of the other places; None without any."""
    alike = comparable([other for other in series if other.op == one.op], one.group)
    others = [other for other in alike if other.group != one.group]
    moved = transfer(one.op, one.group, np.array(one.sizes), others, latency_exponent(alike), topology)
    if moved is None:
        return None
    return np.array(one.seconds), moved.seconds, sqrt(moved.octaves), moved.latency_s


def _scale(parts: Sequence[tuple[Floats, Floats, float, float]], *, symmetric: bool = False) -> ErrorScale:
    """The error scale of (measured, predicted, √h, latency) parts, by regime; ``symmetric``: signs are alike."""
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
