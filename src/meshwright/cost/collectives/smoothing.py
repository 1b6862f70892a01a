"""From measured sizes to curves: one kriging of all series of an op, evaluated once on a grid of sizes.

    series   the rows of an op with equal place, dtype and number of concurrent groups; rows within an eighth of an
             octave count as one, with the means of their bytes and seconds
    grid     `PER_OCTAVE` sizes per factor of two, from 1/16 of the smallest size of a layout to 16 times its largest,
             and the measured sizes, which keep their measured values

Groups inside a node and groups across nodes have separate krigings. Parameters are judged by leaving out a size of a
layout (ranks, their stride, nodes) in all its series (`kriging`).

Between measured sizes seconds may fall: collectives do so where NCCL changes the protocol, in all dtypes. Forbidding
this increases the error on held-out sizes of the V100 tables by 10 to 25 % with a running maximum and by 3 to 6 % with
isotonic regression. Beyond the measured sizes more bytes never take less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives.fitted import Series
from meshwright.cost.collectives.kriging import Points, interpolate

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from meshwright.cost.collectives.groups import CollectiveGroup
    from meshwright.cost.prediction import Floats
    from meshwright.records import Records

PER_OCTAVE = 4
_CELLS_PER_OCTAVE = 8
# Octaves beyond the measured sizes for which the kriging is used; further out it is the last slope.
_BEYOND = 4


def draw_series(rows: Records, groups: Sequence[CollectiveGroup]) -> tuple[tuple[Series, ...], Floats]:
    """Return the series of usable rows, and seconds of each row as if its size had been left out, shape (rows,).

    The latter are nan for the smallest and the largest size of a series.
    """
    series: list[Series] = []
    left_out = np.full(len(rows), np.nan)
    across = np.array([group.num_nodes > 1 for group in groups], bool)
    for op in sorted(set(rows.op)):
        for crossing in (False, True):
            mine = np.flatnonzero((rows.op == op) & (across == crossing))
            if len(mine):
                drawn, left_out[mine] = _draw_alike(rows.select(mine), [groups[index] for index in mine.tolist()])
                series += drawn
    return tuple(series), left_out


def number_labels(labels: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return equal numbers for equal labels, in order of appearance."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(label, len(known)) for label in labels], np.int64)


def _draw_alike(rows: Records, groups: Sequence[CollectiveGroup]) -> tuple[list[Series], Floats]:
    """Return the result of `draw_series` for rows of one op, either all across nodes or all inside."""
    sizes = rows.size("bytes").astype(np.float64)
    labels = list(zip(groups, rows.dtype, rows.size("groups").tolist(), strict=True))
    series_of, cells = number_labels(labels), np.rint(np.log2(sizes) * _CELLS_PER_OCTAVE).astype(np.int64)
    # The number of groups that share the inside of a node belongs to the series, not to the layout.
    layouts = [replace(group, num_sharing=1) if group.num_nodes == 1 else group for group in groups]
    every = Points(
        size=sizes,
        series=series_of,
        layout=number_labels(layouts),
        ranks=np.array([group.num_ranks for group in groups], np.float64),
        nodes=np.array([group.num_nodes for group in groups], np.float64),
        key=number_labels(list(zip(layouts, cells.tolist(), strict=True))),
    )
    point_of_row = number_labels(list(zip(series_of.tolist(), cells.tolist(), strict=True)))
    first = np.unique(point_of_row, return_index=True)[1]
    known = replace(every.select(first), size=_means(point_of_row, sizes))
    seconds = _means(point_of_row, rows.seconds)
    asked = _grid(known)
    found = interpolate(known, seconds, asked)
    series = []
    for index, (group, dtype, num_groups) in enumerate(dict.fromkeys(labels)):
        own, there = known.series == index, asked.series == index
        curve = _join(known.size[own], seconds[own], asked.size[there], found.seconds[there])
        series.append(
            Series(
                op=rows.op[0],
                group=group,
                dtype=dtype,
                num_groups=num_groups,
                measured=tuple(sorted(set(sizes[series_of == index].tolist()))),
                sizes=tuple(curve[0].tolist()),
                seconds=tuple(curve[1].tolist()),
            )
        )
    return series, found.left_out[point_of_row]


def _means(label: NDArray[np.int64], column: Floats) -> Floats:
    """Return the mean of a column for each label, shape (labels,)."""
    means: Floats = np.bincount(label, weights=column) / np.bincount(label)
    return means


def _grid(known: Points) -> Points:
    """Return the grid sizes of each series: over all measured sizes of its layout, and beyond."""
    parts = []
    for index in range(int(known.series.max()) + 1):
        rows = np.flatnonzero(known.series == index)
        alike = known.size[known.layout == known.layout[rows[0]]]
        ends = np.log2([alike.min(), alike.max()])
        steps = np.arange(np.floor((ends[0] - _BEYOND) * PER_OCTAVE), np.ceil((ends[1] + _BEYOND) * PER_OCTAVE) + 1)
        parts.append((rows[0], 2.0 ** (steps / PER_OCTAVE)))
    places = np.concatenate([np.full(len(sizes), row) for row, sizes in parts])
    return replace(known.select(places), size=np.concatenate([sizes for _, sizes in parts]))


def _join(measured: Floats, seconds: Floats, sizes: Floats, drawn: Floats) -> tuple[Floats, Floats]:
    """Return sizes and seconds of a series: the measured ones, and the rest of the grid."""
    below, above = sizes < measured.min(), sizes > measured.max()
    drawn[below] = np.minimum.accumulate(np.append(seconds[measured.argmin()], drawn[below][::-1]))[:0:-1]
    drawn[above] = np.maximum.accumulate(np.append(seconds[measured.argmax()], drawn[above]))[1:]
    new = ~np.isin(sizes, measured)
    joined = np.concatenate([measured, sizes[new]])
    order = np.argsort(joined)
    return joined[order], np.concatenate([seconds, drawn[new]])[order]
