"""Seconds with 80 % intervals and basis: of an op (`OpCost`), a graph's ops (`OpCosts`), many queries (`Predictions`).

Intervals add up as follows. Instances of one op in a model have the same error factor. Different ops have independent
errors. Costs from a datasheet or from other devices have one common error for all ops. So, with deviations d = high - t
of ops i in groups g with common errors,

    high of a sum = Σ t + √ Σ_g (Σ_{i in g} d_i)²            low likewise, with d = t - low

`meshwright validate cpu_ops`, part "totals", compares such sums with measurements.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.team_costs import OpExchange, add_exchanges
from meshwright.spec import Graph, computed_again

if TYPE_CHECKING:
    from collections import Counter

    from meshwright.cost.roofline import RooflineSeconds


# From the most to the least certain: the row itself; its neighbours in a measured series; a regressor fitted on rows of
# this device; rows of other devices, or scaled from another size; only the datasheet.
Basis = Literal["measured", "interpolated", "regressed", "transferred", "roofline"]
BASES: tuple[Basis, ...] = ("measured", "interpolated", "regressed", "transferred", "roofline")

# The share of held-out rows that an interval is meant to contain.
INTERVAL_SHARE = 0.8

Floats = NDArray[np.float64]


# t_low ≤ t ≤ t_high for four out of five held-out rows of the predictor's fit. The interval comes from residuals of
# held-out rows: with r = ln(measured / predicted) and q its quantiles, [t·exp(q₁₀), t·exp(q₉₀)]. Source: split
# conformal prediction (Lei et al., JASA 2018), on the logarithm of the ratio.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """Predicted seconds of n queries, the ends of their 80 % intervals (each of shape (n,)), and the n bases."""

    seconds: Floats
    low_s: Floats
    high_s: Floats
    basis: tuple[Basis, ...]

    def select(self, rows: NDArray[np.bool_]) -> Predictions:
        """Return the predictions of the queries for which the mask ``rows``, of shape (n,), is true."""
        basis = tuple(name for name, kept in zip(self.basis, rows, strict=True) if kept)
        return Predictions(seconds=self.seconds[rows], low_s=self.low_s[rows], high_s=self.high_s[rows], basis=basis)


def join_predictions(parts: Sequence[Predictions]) -> Predictions:
    """Return the predictions of all parts, concatenated in order; at least one part is required."""
    return Predictions(
        seconds=np.concatenate([part.seconds for part in parts]),
        low_s=np.concatenate([part.low_s for part in parts]),
        high_s=np.concatenate([part.high_s for part in parts]),
        basis=tuple(basis for part in parts for basis in part.basis),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The factors ``low`` and ``high`` between which measured / predicted lies for 80 % of held-out rows."""

    low: float
    high: float

    def around(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Return the lower and the upper end, in seconds, of the interval of each prediction (same shape)."""
        return seconds * self.low, seconds * self.high


def fit_interval(measured: Floats, predicted: Floats) -> Interval:
    """Return the 80 % interval of measured / predicted over held-out rows (both of shape (rows,), at least one row).

    The quantiles are those of split conformal prediction, the ⌈(n + 1)·q⌉-th smallest of n ratios. So fewer rows give a
    wider interval.
    """
    ratios = np.sort(np.log(measured / predicted))
    count = len(ratios)
    outside = (1.0 - INTERVAL_SHARE) / 2
    low = max(int(np.floor((count + 1) * outside)) - 1, 0)
    high = min(int(np.ceil((count + 1) * (1.0 - outside))) - 1, count - 1)
    return Interval(low=float(np.exp(ratios[low])), high=float(np.exp(ratios[high])))


End = Literal["low", "high"]

# All ops of a device with one of these bases have a common error.
_SHARED: tuple[Basis, ...] = ("transferred", "roofline")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Seconds of one op (forward, backward, accumulate), the ends of their 80 % intervals, and their basis."""

    seconds: RooflineSeconds
    low: RooflineSeconds
    high: RooflineSeconds
    basis: Basis

    def plus(self, seconds: RooflineSeconds, interval: Interval) -> OpCost:
        """Return the cost of the op plus additional seconds, which have their own interval."""
        low, high = (seconds.scaled(end, end, end) for end in (interval.low, interval.high))
        return replace(self, seconds=self.seconds.plus(seconds), low=self.low.plus(low), high=self.high.plus(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of an operation that is not an op of a graph, such as an optimizer step, with 80 % interval and basis."""

    seconds: float
    low_s: float
    high_s: float
    basis: Basis

    def at(self, end: End | None) -> float:
        """Return the seconds if ``end`` is None, else the "low" or "high" end of their interval."""
        return {None: self.seconds, "low": self.low_s, "high": self.high_s}[end]

    def slowed(self, factor: float) -> Cost:
        """Return the cost with seconds and interval multiplied by ``factor``."""
        return replace(self, seconds=self.seconds * factor, low_s=self.low_s * factor, high_s=self.high_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalSeconds:
    """A sum of costs in seconds, with its 80 % interval."""

    seconds: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpCosts:
    """Seconds of every op of a graph for one microbatch, as read-only float64 arrays of shape (ops,), and their basis.

    ``backward_s``: backward of a step's first microbatch. ``accumulate_s``: additional seconds in later microbatches,
    which accumulate gradients. ``again_s``: part of ``backward_s`` that recomputes ops; that of a recomputed range is
    counted with its last op. ``low_s``, ``high_s``: ends of the 80 % intervals, of shape (ops, 3): forward, backward,
    accumulate. ``group``: ops with equal numbers have a common error. ``exchanged_s``, of shape (ops, 2): part of
    forward and backward in which the op's ranks communicate and do not compute. ``issue_s``, of shape (ops, 3): seconds
    in which the measured host of `host_issue` issues forward, backward and accumulate; None on CPUs.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    accumulate_s: NDArray[np.float64]
    again_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    high_s: NDArray[np.float64]
    group: NDArray[np.int64]
    basis: tuple[Basis, ...]
    exchanged_s: NDArray[np.float64]
    issue_s: NDArray[np.float64] | None = None

    def microbatch_s(self, *, trains: bool = True, first: bool = False) -> NDArray[np.float64]:
        """Return the seconds of every op for one microbatch, shape (ops,): forward, plus backward if ``trains``.

        ``first``: whether it is the first microbatch of a step, which does not accumulate gradients.
        """
        if not trains:
            return self.forward_s
        backward_s = self.backward_s if first else self.backward_s + self.accumulate_s
        return self.forward_s + backward_s

    def layers_s(self, graph: Graph, *, trains: bool = True, first: bool = False) -> NDArray[np.float64]:
        """Return `microbatch_s` summed over the ops of each layer of the graph, shape (layers,)."""
        seconds: NDArray[np.float64] = np.add.reduceat(
            self.microbatch_s(trains=trains, first=first), [layer.start for layer in graph.layers]
        )
        return seconds

    def total(self, ops: Sequence[int] | NDArray[np.int64] | None = None) -> TotalSeconds:
        """Return the sum of forward and backward seconds over ops (indices; default: all), without accumulation."""
        chosen = np.arange(len(self.group)) if ops is None else np.asarray(ops, np.int64)
        seconds = self.microbatch_s(first=True)[chosen]
        low, high = self.low_s[chosen, :2].sum(axis=1), self.high_s[chosen, :2].sum(axis=1)
        return add_intervals(seconds, low, high, self.group[chosen])

    def at_end(self, end: End) -> OpCosts:
        """Return the costs times one factor, which moves their sum to one end of its interval.

        The intervals of the result are empty: ``low_s`` and ``high_s`` equal the seconds.
        """
        whole = self.total()
        factor = (whole.low_s if end == "low" else whole.high_s) / whole.seconds if whole.seconds else 1.0
        columns = self._columns() * factor
        return self._with(columns, columns, columns, self.again_s * factor, self.exchanged_s * factor)

    def slowed(self, factor: float) -> OpCosts:
        """Return the costs on a device that takes ``factor`` times as long for every op."""
        return self._with(
            self._columns() * factor,
            self.low_s * factor,
            self.high_s * factor,
            self.again_s * factor,
            self.exchanged_s * factor,
        )

    def _columns(self) -> NDArray[np.float64]:
        return np.stack([self.forward_s, self.backward_s, self.accumulate_s], axis=1)

    def _with(
        self,
        columns: NDArray[np.float64],
        low_s: NDArray[np.float64],
        high_s: NDArray[np.float64],
        again_s: NDArray[np.float64],
        exchanged_s: NDArray[np.float64],
    ) -> OpCosts:
        for each in (columns, low_s, high_s, again_s, exchanged_s):
            each.setflags(write=False)
        return replace(
            self,
            forward_s=columns[:, 0],
            backward_s=columns[:, 1],
            accumulate_s=columns[:, 2],
            again_s=again_s,
            low_s=low_s,
            high_s=high_s,
            exchanged_s=exchanged_s,
        )


def op_cost_around(seconds: RooflineSeconds, interval: Interval, basis: Basis) -> OpCost:
    """Return the cost of an op with the same interval factors for forward, backward and accumulation."""
    low, high = interval.low, interval.high
    return OpCost(
        seconds=seconds, low=seconds.scaled(low, low, low), high=seconds.scaled(high, high, high), basis=basis
    )


def cost_of_seconds(seconds: float, interval: Interval, basis: Basis) -> Cost:
    """Return seconds as a `Cost`; the factors of ``interval`` give the ends of its interval."""
    return Cost(seconds=seconds, low_s=seconds * interval.low, high_s=seconds * interval.high, basis=basis)


def add_intervals(seconds: Floats, low_s: Floats, high_s: Floats, group: NDArray[np.int64]) -> TotalSeconds:
    """Return the sum of n predictions with its interval; each argument has shape (n,).

    Predictions with equal ``group`` numbers have a common error; the errors of different groups are independent.
    """
    _, places = np.unique(group, return_inverse=True)
    total = float(seconds.sum())
    below, above = (
        float(np.sqrt((np.bincount(places, deviations) ** 2).sum()))
        for deviations in (seconds - low_s, high_s - seconds)
    )
    return TotalSeconds(seconds=total, low_s=max(total - below, 0.0), high_s=total + above)


def gather_costs(
    costs: Sequence[OpCost],
    class_of: NDArray[np.int64],
    graph: Graph,
    exchanges: Sequence[OpExchange] = (),
    slowdown: float = 1.0,
    issued: Sequence[RooflineSeconds] = (),
    alike: NDArray[np.int64] | None = None,
) -> OpCosts:
    """Return the costs of all ops of a graph from the costs of classes of equal ops.

    ``class_of``: the class of each op. ``exchanges``: communication of ops with other ranks, added to their costs.
    ``slowdown``: factor on the seconds of the device, without communication. ``issued``: the host's seconds for each
    class; empty on CPUs. ``alike``: a number per class; classes with equal numbers have a common error; by default each
    class has its own. The ops in the backward half of a joint graph count as backward. Recomputed ops are counted in
    the backward, with the last op of their range.
    """
    runs_backward = np.array([op.phase == "backward" for op in graph.ops], bool)
    again = [(stop - 1, np.array(computed_again(graph, start, stop), np.int64)) for start, stop in graph.recompute]

    def columns(
        parts: Sequence[RooflineSeconds], exchanged_s: Sequence[float] | None, factor: float = slowdown
    ) -> NDArray[np.float64]:
        rows = [(part.forward_s, part.backward_s, part.accumulate_s) for part in parts]
        table = np.array(rows, np.float64).reshape(-1, 3)[class_of] * factor
        table[runs_backward, 1], table[runs_backward, 0] = table[runs_backward, 0], 0.0
        if exchanged_s is not None:
            add_exchanges(table, exchanges, np.array(exchanged_s, np.float64))
        for last, ops in again:
            table[last, 1] += table[ops, 0].sum()
        table.setflags(write=False)
        return table

    own = [cost.seconds for cost in costs]
    seconds = columns(own, [item.seconds for item in exchanges])
    exchanged = (seconds - columns(own, None))[:, :2] if exchanges else np.zeros((len(seconds), 2))
    exchanged.setflags(write=False)
    again_s = np.zeros(len(seconds))
    for last, ops in again:
        again_s[last] = seconds[ops, 0].sum()
    again_s.setflags(write=False)
    groups = np.array(
        [
            -1 - _SHARED.index(cost.basis) if cost.basis in _SHARED else i
            for i, cost in zip(range(len(costs)) if alike is None else alike, costs, strict=True)
        ],
        np.int64,
    )
    return OpCosts(
        forward_s=seconds[:, 0],
        backward_s=seconds[:, 1],
        accumulate_s=seconds[:, 2],
        again_s=again_s,
        low_s=columns([cost.low for cost in costs], [item.low_s for item in exchanges]),
        high_s=columns([cost.high for cost in costs], [item.high_s for item in exchanges]),
        group=groups[class_of],
        basis=tuple(costs[index].basis for index in class_of),
        exchanged_s=exchanged,
        issue_s=columns(issued, None, 1.0) if issued else None,
    )


def explain_bases(counts: Counter[Basis], kinds: Collection[str]) -> str:
    """Return a sentence with the numbers of op costs by basis, for the user; ``kinds``: names of the device kinds."""
    total, guessed = counts.total(), counts["roofline"]
    if guessed == total:
        return (
            f"Basis: nothing was measured on {', '.join(kinds)}; all times are rooflines from datasheets, "
            "which real steps mostly exceed. `meshwright measure` replaces them on a machine that you have."
        )
    words = ", ".join(f"{count} {basis}" for basis, count in sorted(counts.items()))
    warning = "; rooflines are mostly too short: run `meshwright measure` to replace them" if guessed else ""
    return f"Basis of {total} op costs: {words}{warning}."
