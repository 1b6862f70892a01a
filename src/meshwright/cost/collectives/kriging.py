"""Seconds of collectives between measured sizes, by kriging (Gaussian-process regression) over similar series.

`interpolate` is the kriging. `draw_series` computes the curve (seconds over bytes) of each measured series. A layout is
a set of groups with equal numbers of ranks and nodes, and equal stride. The time t of x bytes is modelled as

    t = w·(1 + y),  w = α + β·x     the line of all series of the layout, α, β ≥ 0, least squares of relative errors
    cov(y, y') = (a·a' + b·b')·e^(-|Δ log₂ x| / 12)·(σ₁²·[same layout] + σ₂²·[same series] + σ₃²·s) + (…)·σ₄²·s'
               + e^(-|Δ log₂ x| / d)·(τ₁²·[same layout] + τ₂²·[same series] + τ₃²·s) + (…)·τ₄²·s'
               + ε²·(t/w)²·[same row],      a = α/w, b = β·x/w

Latency and bandwidth of a series drift with an exponential covariance. With one series, this gives linear
interpolation. Other series of the same layout average the noise. Series of other layouts show where a protocol
switches; they are weighted with s = e^(-|Δ log₂ ranks| / κ - |Δ log₂ nodes| / λ) at equal bytes, and with s' at equal
bytes per rank. The parameters are not tuned. `NUM_DRAWS` sets of them are drawn over wide ranges with a fixed seed, the
same for every table. Each set is judged by leaving out the rows of one key at a time (in closed form), and the
predictions of the best `NUM_KEPT` sets are averaged. The left-out rows also decide the weight of a straight line
between neighbouring sizes. Outside the measured sizes only the kriging is used; it approaches the line of the layout.

Sources: Cressie, Statistics for Spatial Data (1993), 3.2; leaving out in closed form: Dubrule, Mathematical Geology 15
(1983).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives.fitted import Series
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from meshwright.cost.collectives.collective_groups import CollectiveGroup
    from meshwright.cost.costs import Floats
    from meshwright.records import Records


NUM_DRAWS = 32
NUM_KEPT = 4
_SEED = 20261121
# Octaves over which latency and bandwidth of a series drift. An unfitted guess: about half of the octaves that a table
# spans (23 for NCCL, 31 for the V100s).
_DRIFT = 12.0
# Lower limit of results as a share of the line.
_LOWEST = 0.1
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Rows of measured series, with one entry per row in each field.

    ``size``: bytes of the full tensor. ``series`` and ``layout``: numbers of the series and of the layout. ``ranks``
    and ``nodes``: size of the process group. Rows with the same ``key`` are left out together when parameters are
    judged. A series has one row per key.
    """

    size: Floats
    series: NDArray[np.int64]
    layout: NDArray[np.int64]
    ranks: Floats
    nodes: Floats
    key: NDArray[np.int64]

    def select(self, rows: NDArray[np.int64]) -> Points:
        """Return the rows of the given indices."""
        return Points(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Covariance:
    """One set of parameters of the module's covariance formula.

    ``drift``: σ₁ to σ₄; ``bend``: τ₁ to τ₄; ``bend_octaves``: d; ``rank_octaves``: κ; ``node_octaves``: λ; ``noise``:
    ε.
    """

    drift: tuple[float, float, float, float]
    bend: tuple[float, float, float, float]
    bend_octaves: float
    rank_octaves: float
    node_octaves: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interpolation:
    """The result of `interpolate`.

    ``seconds``: predictions at the asked rows, shape (asked,). ``left_out``: predictions at the known rows, shape
    (known,), each made without the rows of its key; nan for the smallest and the largest size of a series.
    """

    seconds: Floats
    left_out: Floats


def interpolate(known: Points, seconds: Floats, asked: Points) -> Interpolation:
    """Return predicted seconds at the rows ``asked``, from the measured ``seconds`` (shape (known,)) of rows ``known``.

    Raises MeasurementError if a series of ``asked`` has no row in ``known``.
    """
    if missing := set(asked.series.tolist()) - set(known.series.tolist()):
        raise MeasurementError(
            f"{len(missing)} series of collectives have no measured size; interpolate only series that were measured."
        )
    lines = {int(index): _fit_line(known.size[rows], seconds[rows]) for index, rows in _by(known.layout)}
    here, there = _Line.of(known, lines), _Line.of(asked, lines)
    straight = _between_neighbours(known, seconds, known, strictly=True)
    judged = np.isfinite(straight)
    among, towards = _Likeness.of(known, known), _Likeness.of(asked, known)
    relative = seconds / here.total
    judgements = []
    for draw in _draws():
        matrix = among.covariance(draw, here, here)
        matrix[np.diag_indices_from(matrix)] += (draw.noise * relative) ** 2
        inverse: Floats = np.linalg.inv(matrix).astype(np.float64)
        weights: Floats = inverse @ (relative - 1.0)
        left_out = np.maximum(relative - _left_out_residuals(inverse, weights, known.key), _LOWEST) * here.total
        judgements.append(
            _Judgement(
                error=_mean_error(left_out[judged], seconds[judged]), draw=draw, weights=weights, left_out=left_out
            )
        )
    kept = sorted(judgements, key=lambda judgement: judgement.error)[:NUM_KEPT]
    answers = [1.0 + towards.covariance(one.draw, there, here) @ one.weights for one in kept]
    kriged = there.total * _geometric_mean([np.maximum(answer, _LOWEST) for answer in answers])
    left_out = _geometric_mean([one.left_out for one in kept])
    share = _choose_share(straight[judged], left_out[judged], seconds[judged])
    own = _between_neighbours(known, seconds, asked, strictly=False)
    return Interpolation(
        seconds=np.where(np.isfinite(own), own**share * kriged ** (1.0 - share), kriged),
        left_out=straight**share * left_out ** (1.0 - share),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Judgement:
    """A draw's predictions for held-out rows, its mean relative error there, and the weights of the known rows."""

    error: float
    draw: Covariance
    weights: Floats
    left_out: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Line:
    """w of the module's formula at each row and the shares of its two terms, each of shape (rows,)."""

    latency: Floats
    transfer: Floats
    total: Floats

    @classmethod
    def of(cls, rows: Points, lines: dict[int, tuple[float, float]]) -> _Line:
        alpha, beta = np.array([lines[int(index)] for index in rows.layout]).reshape(-1, 2).T
        total = alpha + beta * rows.size
        return cls(latency=alpha / total, transfer=beta * rows.size / total, total=total)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Likeness:
    """The similarity of two sets of rows, each of shape (first, second): octaves between them, and equal labels."""

    by_size: Floats
    by_part: Floats
    by_ranks: Floats
    by_nodes: Floats
    layout: NDArray[np.bool_]
    series: NDArray[np.bool_]

    @classmethod
    def of(cls, first: Points, second: Points) -> _Likeness:
        def octaves(left: Floats, right: Floats) -> Floats:
            apart: Floats = np.abs(np.log2(left)[:, None] - np.log2(right)[None, :])
            return apart

        return cls(
            by_size=octaves(first.size, second.size),
            by_part=octaves(first.size / first.ranks, second.size / second.ranks),
            by_ranks=octaves(first.ranks, second.ranks),
            by_nodes=octaves(first.nodes, second.nodes),
            layout=first.layout[:, None] == second.layout[None, :],
            series=first.series[:, None] == second.series[None, :],
        )

    def covariance(self, draw: Covariance, first: _Line, second: _Line) -> Floats:
        near = np.exp(-self.by_ranks / draw.rank_octaves - self.by_nodes / draw.node_octaves)

        def term(scales: tuple[float, float, float, float], octaves: float) -> Floats:
            own = scales[0] ** 2 * self.layout + scales[1] ** 2 * self.series + scales[2] ** 2 * near
            return own * np.exp(-self.by_size / octaves) + scales[3] ** 2 * near * np.exp(-self.by_part / octaves)

        linear = first.latency[:, None] * second.latency[None, :] + first.transfer[:, None] * second.transfer[None, :]
        covariance: Floats = linear * term(draw.drift, _DRIFT) + term(draw.bend, draw.bend_octaves)
        return covariance


def _fit_line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """Return (α, β) ≥ 0 of least squares of relative errors; the better one-term fit if one is negative."""
    scale = sizes.max()
    design = np.stack([1.0 / seconds, sizes / (scale * seconds)], axis=1)
    alpha, beta = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    if alpha < 0 or beta < 0:
        alone = design.sum(axis=0) / (design**2).sum(axis=0)
        errors = ((design * alone - 1.0) ** 2).sum(axis=0)
        alpha, beta = (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
    return float(alpha), float(beta / scale)


def _between_neighbours(known: Points, seconds: Floats, asked: Points, *, strictly: bool) -> Floats:
    """Return seconds on the line between the next sizes of the same series, shape (asked,); nan if one is missing.

    ``strictly``: a size is not its own neighbour, as if it had been left out.
    """
    answer = np.full(len(asked.size), np.nan)
    for index, rows in _by(known.series):
        order = rows[np.argsort(known.size[rows], kind="stable")]
        sizes, times, mine = known.size[order], seconds[order], np.flatnonzero(asked.series == index)
        above = np.searchsorted(sizes, asked.size[mine], side="right" if strictly else "left")
        below = np.searchsorted(sizes, asked.size[mine], side="left" if strictly else "right") - 1
        there = (below >= 0) & (above < len(sizes))
        mine, above, below = mine[there], above[there], below[there]
        span = np.maximum(sizes[above] - sizes[below], np.finfo(np.float64).tiny)
        share = (asked.size[mine] - sizes[below]) / span
        answer[mine] = times[below] + share * (times[above] - times[below])
    return answer


def _left_out_residuals(inverse: Floats, weights: Floats, key: NDArray[np.int64]) -> Floats:
    """Return residuals of rows when those of their key are left out: r = (K⁻¹)_gg⁻¹ · (K⁻¹ y)_g, shape (rows,)."""
    residuals = np.empty(len(key))
    for _, rows in _by(key):
        residuals[rows] = np.linalg.solve(inverse[np.ix_(rows, rows)], weights[rows])
    return residuals


def _choose_share(straight: Floats, kriged: Floats, seconds: Floats) -> float:
    """Return the weight of straight lines in the geometric mean of both with the least error on held-out rows."""
    errors = [_mean_error(straight**share * kriged ** (1.0 - share), seconds) for share in _SHARES]
    return _SHARES[int(np.argmin(errors))]


def _geometric_mean(columns: Sequence[Floats]) -> Floats:
    mean: Floats = np.exp(np.mean(np.log(columns), axis=0))
    return mean


def _mean_error(predicted: Floats, seconds: Floats) -> float:
    return float(np.abs(predicted / seconds - 1.0).mean()) if len(seconds) else 0.0


def _by(labels: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Return each label and the indices of its rows."""
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return [(int(labels[rows[0]]), rows) for rows in groups if len(rows)]


def _draws() -> list[Covariance]:
    """Return the parameters to try: independent draws from short lists that span each range by factors of two."""
    random = np.random.default_rng(_SEED)

    def one_of(*values: float) -> float:
        return float(random.choice(values))

    return [
        Covariance(
            drift=(
                one_of(0.05, 0.1, 0.2, 0.4),
                one_of(0.05, 0.1, 0.2, 0.4),
                one_of(0.0, 0.1, 0.2, 0.4),
                one_of(0.0, 0.1, 0.2, 0.4),
            ),
            bend=(one_of(0.0, 0.03, 0.1), one_of(0.0, 0.03), one_of(0.0, 0.03, 0.1), one_of(0.0, 0.03, 0.1)),
            bend_octaves=one_of(0.5, 1.0, 2.0, 4.0),
            rank_octaves=one_of(0.5, 1.0, 2.0, 4.0),
            node_octaves=one_of(0.5, 1.0, 2.0, 4.0),
            noise=one_of(0.01, 0.02, 0.03, 0.05),
        )
        for _ in range(NUM_DRAWS)
    ]


PER_OCTAVE = 4
_CELLS_PER_OCTAVE = 8
# Octaves beyond the measured sizes for which the kriging is used; further out it is the last slope.
_BEYOND = 4


# One kriging of all series of an op is evaluated once on a grid of sizes:
#
#     series   the rows of an op with equal place, dtype and number of concurrent groups; rows within an eighth of an
#              octave count as one, with the means of their bytes and seconds
#     grid     `PER_OCTAVE` sizes per factor of two, from 1/16 of the smallest size of a layout to 16 times its largest,
#              and the measured sizes, which keep their measured values
#
# Groups inside a node and groups across nodes have separate krigings. Parameters are judged by leaving out a size of a
# layout (ranks, their stride, nodes) in all its series.
#
# Between measured sizes seconds may fall: collectives do so where NCCL changes the protocol, in all dtypes. Forbidding
# this increases the error on held-out sizes of the V100 tables by 10 to 25 % with a running maximum and by 3 to 6 %
# with isotonic regression. Beyond the measured sizes more bytes never take less.
def draw_series(rows: Records, groups: Sequence[CollectiveGroup]) -> tuple[tuple[Series, ...], Floats]:
    """Return the series of usable rows, and held-out predictions of the seconds of each row, shape (rows,).

    ``groups``: the process group of each row. The prediction of a row is made without its size; it is nan for the
    smallest and the largest size of a series.
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
    """Return the number of each label, shape (labels,); distinct labels are numbered from 0 in order of appearance."""
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
