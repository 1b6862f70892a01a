"""Seconds of a collective from measurements on a cluster, of the same process group or of groups of other sizes.

    measured      this size and group was measured
    interpolated  the group was measured at other sizes: straight lines through the measured points and through the
                  points of a grid, which a kriging of all series gives between and beyond them (`kriging`)
    transferred   t = t₀(lo)^(1-u)·t₀(hi)^u + w(lo)^(1-v)·w(hi)^v, u linear in log n, v linear in 1/n

t₀(m) is the latency of a measured group of m ranks: its time at the smallest size of the grid. w(m) = t(m, S') - t₀(m)
is its time above the latency, for the message S' that moves as many bytes through the busiest port as S does in this
group (`port_share`, which includes rings, NIC sharing and the links of the node). lo and hi are the next smaller and
larger groups among the groups with the most similar number of groups per NIC. Beyond the smallest or largest group,
only the nearest one is used, and t₀ grows with n^γ. γ is fitted over all groups of the op; if they all have the same
number of ranks, t₀ grows as the steps of a ring instead. Groups inside a node are not used for groups across nodes, nor
the reverse.

An all-reduce over more nodes than were measured takes the faster of the tree and the ring. The ring's time is that of a
reduce-scatter plus an all-gather, each transferred separately. (Measurements on two nodes do not show the ring: NCCL's
tree carries the tensor through a NIC once on two nodes, twice on three or more, and NCCL prefers the tree up to two
nodes; src/graph/tuning.cc.)

The error of a transfer is assumed to grow with √h, as in a random walk. h is the distance in octaves of ranks from the
nearest measured group; between two groups at distances a and b it is a·b/(a + b). The scale of the error comes from
predicting each measured group from the others (`fit_collectives`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, log2, sqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.cost.collectives.algorithms import CollectiveOp, Topology, check_messages, count_steps, port_share
from meshwright.cost.collectives.collective_groups import CollectiveGroup
from meshwright.cost.costs import Basis, Floats, Interval, Predictions
from meshwright.cost.op_estimates import Curve
from meshwright.spec import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_MEASURED: tuple[Basis, ...] = ("measured",)
_TRANSFERRED: tuple[Basis, ...] = ("transferred",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Seconds of one collective for one dtype and group by size, while ``num_groups`` groups in total ran it at once.

    ``sizes`` are bytes of the full tensor, ascending: the ``measured`` sizes and those of the kriging's grid.
    ``seconds`` has one entry per size. It may decrease with size, for example where NCCL changes the protocol.
    """

    op: CollectiveOp
    group: CollectiveGroup
    dtype: str
    num_groups: int
    measured: tuple[float, ...]
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, sizes: Floats) -> Floats:
        """Return seconds at sizes in bytes (any shape), interpolated by `Curve`."""
        return Curve(sizes=np.array(self.sizes), seconds=np.array(self.seconds)).at(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlace:
    """The measurements of one collective in one group; its time is the mean over its series."""

    group: CollectiveGroup
    series: tuple[Series, ...]

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message, averaged over the series."""
        return float(np.mean([one.seconds[0] for one in self.series]))

    @property
    def begins(self) -> float:
        """Smallest size, in bytes, of any of the series."""
        return min(one.sizes[0] for one in self.series)

    @property
    def measured(self) -> frozenset[float]:
        """Sizes in bytes at which any of the series was measured."""
        return frozenset(size for one in self.series for size in one.measured)

    def at(self, sizes: Floats) -> Floats:
        """Return the mean seconds of the series at sizes in bytes (any shape)."""
        mean: Floats = np.mean([one.at(sizes) for one in self.series], axis=0)
        return mean

    def narrow(self, dtype: str, num_groups: int) -> MeasuredPlace:
        """Return a copy with the series of a dtype, else those of dtypes of the same width, else all series.

        Among these series, those measured with ``num_groups`` groups at once are preferred.
        """
        width, chosen = DTYPE_BYTES.get(dtype, 0), self.series
        chosen = tuple(one for one in chosen if DTYPE_BYTES.get(one.dtype) == width) or chosen
        chosen = tuple(one for one in chosen if one.dtype == dtype) or chosen
        chosen = tuple(one for one in chosen if one.num_groups == num_groups) or chosen
        return replace(self, series=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScale:
    """Intervals of the factor measured / predicted that contain 80 % of held-out rows.

    ``latency`` holds for messages whose latency is more than half of their time, ``bandwidth`` for larger messages.
    """

    latency: Interval
    bandwidth: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """The measured collectives of one cluster, from which `predict` computes seconds; the module has the formulas.

    ``interpolated``, ``moved_inside`` and ``moved_across``: errors of interpolation, and of transfers between groups
    inside a node and across nodes. ``topology``: the links of a node, None if all devices have equal links.
    ``row_hashes``: hashes of the measurement rows of the fit, in hexadecimal.
    """

    device: str
    series: tuple[Series, ...]
    interpolated: ErrorScale
    moved_inside: ErrorScale
    moved_across: ErrorScale
    topology: Topology | None = None
    row_hashes: tuple[str, ...] = ()

    SCHEMA_VERSION: ClassVar[int] = 1

    def has_measured(self, op: CollectiveOp, group: CollectiveGroup) -> bool:
        """Return whether a collective was measured in groups of the same number of ranks, in or across nodes alike."""
        alike = group.num_ranks, group.num_nodes > 1
        return any(one.op == op and (one.group.num_ranks, one.group.num_nodes > 1) == alike for one in self.series)

    def predict(
        self, op: CollectiveOp, group: CollectiveGroup, num_bytes: Floats, *, dtype: str = "", num_groups: int = 0
    ) -> Predictions | None:
        """Return seconds for messages of ``num_bytes`` (shape (n,), bytes of the full tensor); 0 for a single rank.

        If the group was measured with several dtypes or numbers of concurrent groups, the series with ``dtype`` and
        ``num_groups`` are used, or the mean of all series if these were not measured. Returns None if no comparable
        group was measured. Raises MeasurementError for an unknown collective, and for negative or infinite sizes.
        """
        check_messages(op, num_bytes)
        if group.num_ranks == 1:
            nothing = np.zeros(len(num_bytes))
            return Predictions(seconds=nothing, low_s=nothing, high_s=nothing, basis=_MEASURED * len(num_bytes))
        places = list_places(series for series in self.series if series.op == op)
        own = self._find(places, group)
        if own is not None:
            own = own.narrow(dtype, num_groups)
            measured = own.measured
            basis: tuple[Basis, ...] = tuple("measured" if size in measured else "interpolated" for size in num_bytes)
            found = with_interval(own.at(num_bytes), own.latency_s, self.interpolated, 1.0, basis)
            return self._from_smaller(op, own, places, num_bytes, found)
        known = comparable(places, group)
        moved = transfer(op, group, num_bytes, known, latency_exponent(known), self.topology)
        if moved is None:
            return None
        if op == "all_reduce" and group.num_nodes > max(2, *(place.group.num_nodes for place in known)):
            halves = [self.predict(half, group, num_bytes) for half in ("reduce_scatter", "all_gather")]
            if halves[0] is not None and halves[1] is not None:
                ring = halves[0].seconds + halves[1].seconds
                moved = Transfer(np.minimum(moved.seconds, ring), moved.latency_s, moved.octaves)
        scale = self.moved_across if group.num_nodes > 1 else self.moved_inside
        return with_interval(moved.seconds, moved.latency_s, scale, sqrt(moved.octaves), _TRANSFERRED * len(num_bytes))

    def _from_smaller(
        self,
        op: CollectiveOp,
        own: MeasuredPlace,
        places: Sequence[MeasuredPlace],
        num_bytes: Floats,
        found: Predictions,
    ) -> Predictions:
        """Predict messages smaller than all of the place's curves from places with such sizes.

        A series that starts at a megabyte contains no latency.
        """
        below = num_bytes < own.begins
        if not below.any():
            return found
        others = [one for one in comparable(places, own.group) if one.group != own.group and one.begins < own.begins]
        moved = transfer(op, own.group, num_bytes, others, latency_exponent(others), self.topology)
        if moved is None:
            return found
        scale = self.moved_across if own.group.num_nodes > 1 else self.moved_inside
        away = with_interval(
            moved.seconds, moved.latency_s, scale, sqrt(max(moved.octaves, 1.0)), _TRANSFERRED * len(num_bytes)
        )
        return Predictions(
            seconds=np.where(below, away.seconds, found.seconds),
            low_s=np.where(below, away.low_s, found.low_s),
            high_s=np.where(below, away.high_s, found.high_s),
            basis=tuple(b if is_below else a for a, b, is_below in zip(found.basis, away.basis, below, strict=True)),
        )

    def _find(self, places: Sequence[MeasuredPlace], group: CollectiveGroup) -> MeasuredPlace | None:
        """Return the place of a group if it was measured; without a topology, the stride may differ."""
        exact = next((place for place in places if place.group == group), None)
        if exact is not None or self.topology is not None:
            return exact
        level = replace(group, stride=1)
        return next((place for place in places if replace(place.group, stride=1) == level), None)


def list_places(series: Iterable[Series]) -> list[MeasuredPlace]:
    """Return the series of one collective by group, in order of appearance."""
    found: dict[CollectiveGroup, list[Series]] = {}
    for one in series:
        found.setdefault(one.group, []).append(one)
    return [MeasuredPlace(group=group, series=tuple(mine)) for group, mine in found.items()]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds (shape (n,)) of a collective computed from other groups.

    ``latency_s``: the latency within these seconds; ``octaves``: the distance h of the other groups (see the module).
    """

    seconds: Floats
    latency_s: float
    octaves: float


def comparable(known: Sequence[MeasuredPlace], group: CollectiveGroup) -> list[MeasuredPlace]:
    """Return the measured groups across nodes if ``group`` crosses nodes, else the measured groups inside a node."""
    return [one for one in known if (one.group.num_nodes > 1) == (group.num_nodes > 1)]


def latency_exponent(alike: Sequence[MeasuredPlace]) -> float | None:
    """Return the exponent γ (0..1) of latency ∝ ranks^γ over comparable groups.

    Returns None if all groups have the same number of ranks.
    """
    ranks = np.log2([place.group.num_ranks for place in alike])
    if not len(ranks) or np.ptp(ranks) == 0:
        return None
    latencies = np.log2([place.latency_s for place in alike])
    slope = float(np.polyfit(ranks, latencies, 1)[0])
    return min(max(slope, 0.0), 1.0)


def transfer(
    op: CollectiveOp,
    group: CollectiveGroup,
    num_bytes: Floats,
    alike: Sequence[MeasuredPlace],
    exponent: float | None,
    topology: Topology | None,
) -> Transfer | None:
    """Return the time of a group computed from the comparable measured groups ``alike``; None if this list is empty.

    ``exponent``: γ of `latency_exponent`; with None, latency grows as the steps of a ring. ``topology``: the links of a
    node; None if all are equal.
    """
    if not alike:
        return None
    nearest = min(_sharing_octaves(place, group) for place in alike)
    alike = [place for place in alike if _sharing_octaves(place, group) <= nearest + 1e-9]
    below = [place for place in alike if place.group.num_ranks <= group.num_ranks]
    above = [place for place in alike if place.group.num_ranks >= group.num_ranks]
    low, high = (min(side or alike, key=lambda place: _remoteness(place, group)) for side in (below, above))
    wires = [_wire_seconds(op, end, group, num_bytes, topology) for end in (low, high)]
    ranks, first, last = group.num_ranks, low.group.num_ranks, high.group.num_ranks
    if first == last:
        more = count_steps(op, group) / count_steps(op, low.group) if exponent is None else (ranks / first) ** exponent
        latency = low.latency_s * more
        octaves = abs(log2(ranks / first)) + abs(log2(group.num_nodes / low.group.num_nodes)) + nearest
        return Transfer(latency + np.sqrt(wires[0] * wires[1]), latency, octaves)
    along = log(ranks / first) / log(last / first)
    inverse = (1 / first - 1 / ranks) / (1 / first - 1 / last)
    latency = low.latency_s ** (1 - along) * high.latency_s**along
    apart = log2(ranks / first), log2(last / ranks)
    octaves = apart[0] * apart[1] / (apart[0] + apart[1]) + nearest
    return Transfer(latency + wires[0] ** (1 - inverse) * wires[1] ** inverse, latency, octaves)


def _wire_seconds(
    op: CollectiveOp, place: MeasuredPlace, group: CollectiveGroup, num_bytes: Floats, topology: Topology | None
) -> Floats:
    """Return a measured group's seconds above its latency for the same bytes through its busiest port."""
    here, there = _port_share(op, group, place.group, topology), _port_share(op, place.group, place.group, topology)
    wire: Floats = np.maximum(place.at(num_bytes * here / there) - place.latency_s, 0.0)
    return wire


def _port_share(
    op: CollectiveOp, group: CollectiveGroup, measured: CollectiveGroup, topology: Topology | None
) -> float:
    """Return bytes through the busiest port per byte, if the group runs the measured group's algorithm."""
    if group.num_nodes > 1:
        return port_share(op, group, algorithm="tree" if measured.num_nodes == 2 else "ring")
    if topology is None:
        return port_share(op, group)
    devices = tuple(range(0, group.num_ranks * group.stride, group.stride))
    algorithm, count = topology.lanes_among(devices)
    return port_share(op, group, num_lanes=count, algorithm=algorithm)


def _sharing_octaves(place: MeasuredPlace, group: CollectiveGroup) -> float:
    return abs(log2(place.group.num_sharing / group.num_sharing))


def _remoteness(place: MeasuredPlace, group: CollectiveGroup) -> tuple[float, int]:
    """Return the distance of a place from a group: octaves of ranks and nodes, then the difference of strides."""
    here = place.group
    octaves = abs(log2(here.num_ranks / group.num_ranks)) + abs(log2(here.num_nodes / group.num_nodes))
    return octaves, abs(here.stride - group.stride)


def with_interval(
    seconds: Floats, latency_s: float | Floats, scale: ErrorScale, stretch: float, basis: tuple[Basis, ...]
) -> Predictions:
    """Return predictions with intervals from an error scale, whose factors are raised to the power ``stretch``.

    Where the latency is more than half of the time, ``scale.latency`` applies, elsewhere ``scale.bandwidth``.
    """
    in_latency = latency_s > seconds / 2
    low = np.where(in_latency, scale.latency.low, scale.bandwidth.low) ** stretch
    high = np.where(in_latency, scale.latency.high, scale.bandwidth.high) ** stretch
    return Predictions(seconds=seconds, low_s=seconds * low, high_s=seconds * high, basis=basis)
