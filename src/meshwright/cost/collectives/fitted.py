"""Seconds of a collective from those that were measured on a cluster: of this group, or of groups placed otherwise.

    measured      the very size of the very group
    interpolated  the group, at sizes below and above
    transferred   t = t₀(lo)^(1-u)·t₀(hi)^u + w(lo)^(1-v)·w(hi)^v,  u linear in log n, v linear in 1/n

where t₀(m) is the latency of a measured group of m ranks, its time at the smallest size, and w(m) = t(m, S') - t₀(m)
its time above that for the message S' that puts as many bytes through the busiest port as S does here (`port_share`:
rings, NIC sharing and the links of the node are in it). lo and hi are the next smaller and larger groups among those
whose NICs are shared by the most similar number of groups, one of them alone beyond the ends; there t₀ grows with
n^γ, γ fitted over all groups of the op. Groups inside a node say nothing about groups across nodes, and the reverse.

An all-reduce over more nodes than were measured takes the faster of the tree and of the ring: the ring is a
reduce-scatter and an all-gather, each transferred by itself (two nodes say nothing of it: NCCL's tree carries the
tensor through a NIC once there, twice from three nodes on, and is preferred up to two; src/graph/tuning.cc).

The error of a transfer is taken to grow with √h, h octaves of ranks from the nearest measured group, a·b/(a + b)
between two: that of a random walk. Its scale comes from predicting each measured group from the others
(`fit_collectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2, sqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.cost.collectives.algorithms import CollectiveOp, check_messages, port_share
from meshwright.cost.collectives.groups import Group
from meshwright.cost.collectives.topologies import Topology
from meshwright.cost.curves import Curve
from meshwright.cost.prediction import Interval, Predictions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.prediction import Basis, Floats


_MEASURED: tuple[Basis, ...] = ("measured",)
_TRANSFERRED: tuple[Basis, ...] = ("transferred",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Seconds of one op in one place: ``sizes`` are bytes of the full tensor, ascending; ``seconds`` never decrease."""

    op: CollectiveOp
    group: Group
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    def at(self, sizes: Floats) -> Floats:
        """Seconds at sizes (any shape), as `Curve` has them."""
        return Curve(sizes=np.array(self.sizes), seconds=np.array(self.seconds)).at(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScale:
    """Logarithms of measured / predicted that hold 80 % of rows left out, in the latency and the bandwidth regime."""

    latency: Interval
    bandwidth: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """The collectives of one cluster as plain data; see the module's docstring.

    ``row_hashes`` are those of the rows that it was fitted on, in hexadecimal.
    """

    device: str
    series: tuple[Series, ...]
    interpolated: ErrorScale
    moved_inside: ErrorScale
    moved_across: ErrorScale
    topology: Topology | None = None
    row_hashes: tuple[str, ...] = ()

    SCHEMA_VERSION: ClassVar[int] = 1

    def predict(self, op: CollectiveOp, group: Group, num_bytes: Floats) -> Predictions | None:
        """Seconds for messages of ``num_bytes`` (shape (n,), bytes of the full tensor); a single rank takes no time.

        None if nothing comparable was measured. Raises MeasurementError for sizes that are negative or no numbers.
        """
        check_messages(op, num_bytes)
        if group.num_ranks == 1:
            nothing = np.zeros(len(num_bytes))
            return Predictions(seconds=nothing, low_s=nothing, high_s=nothing, basis=_MEASURED * len(num_bytes))
        own = self.find(op, group)
        if own is not None:
            basis: tuple[Basis, ...] = tuple("measured" if size in own.sizes else "interpolated" for size in num_bytes)
            seconds = own.at(num_bytes)
            return with_interval(seconds, own.latency_s, self.interpolated, 1.0, basis)
        known = comparable([series for series in self.series if series.op == op], group)
        moved = transfer(op, group, num_bytes, known, latency_exponent(known), self.topology)
        if moved is None:
            return None
        if op == "all_reduce" and group.num_nodes > max(2, *(series.group.num_nodes for series in known)):
            halves = [self.predict(half, group, num_bytes) for half in ("reduce_scatter", "all_gather")]
            if halves[0] is not None and halves[1] is not None:
                ring = halves[0].seconds + halves[1].seconds
                moved = Transfer(np.minimum(moved.seconds, ring), moved.latency_s, moved.octaves)
        scale = self.moved_across if group.num_nodes > 1 else self.moved_inside
        return with_interval(moved.seconds, moved.latency_s, scale, sqrt(moved.octaves), _TRANSFERRED * len(num_bytes))

    def find(self, op: CollectiveOp, group: Group) -> Series | None:
        """The measured series of an op in a place; devices behind one switch are all alike, whatever their stride."""
        for series in self.series:
            here = series.group
            alike = self.topology is None or here.num_nodes > 1 or here.stride == group.stride
            places = (here.num_ranks, here.num_nodes, here.num_sharing)
            if series.op == op and alike and places == (group.num_ranks, group.num_nodes, group.num_sharing):
                return series
        return None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds (shape (n,)) taken from other groups, the latency in them, and how far away those are."""

    seconds: Floats
    latency_s: float
    octaves: float


def comparable(known: Sequence[Series], group: Group) -> list[Series]:
    """The series of groups that cross nodes if the group does, and do not if it does not."""
    return [one for one in known if (one.group.num_nodes > 1) == (group.num_nodes > 1)]


def latency_exponent(alike: Sequence[Series]) -> float:
    """γ of t₀ ∝ n^γ over comparable groups, from 0 to 1; that of a ring's steps where only one number was measured."""
    ranks = np.log2([series.group.num_ranks for series in alike])
    if not len(ranks) or np.ptp(ranks) == 0:
        return 1.0
    latencies = np.log2([series.latency_s for series in alike])
    slope = float(np.polyfit(ranks, latencies, 1)[0])
    return min(max(slope, 0.0), 1.0)


def transfer(
    op: CollectiveOp,
    group: Group,
    num_bytes: Floats,
    alike: Sequence[Series],
    exponent: float,
    topology: Topology | None,
) -> Transfer | None:
    """The time of a group from comparable series of the op, with γ; None if there is no such series."""
    if not alike:
        return None
    nearest = min(_sharing_octaves(series, group) for series in alike)
    alike = [series for series in alike if _sharing_octaves(series, group) <= nearest + 1e-9]
    below = [series for series in alike if series.group.num_ranks <= group.num_ranks]
    above = [series for series in alike if series.group.num_ranks >= group.num_ranks]
    low, high = (min(side or alike, key=lambda series: _remoteness(series, group)) for side in (below, above))
    wires = [_wire_seconds(op, end, group, num_bytes, topology) for end in (low, high)]
    ranks, first, last = group.num_ranks, low.group.num_ranks, high.group.num_ranks
    if first == last:
        latency = low.latency_s * (ranks / first) ** exponent
        octaves = abs(log2(ranks / first)) + abs(log2(group.num_nodes / low.group.num_nodes)) + nearest
        return Transfer(latency + np.sqrt(wires[0] * wires[1]), latency, octaves)
    along = log(ranks / first) / log(last / first)
    inverse = (1 / first - 1 / ranks) / (1 / first - 1 / last)
    latency = low.latency_s ** (1 - along) * high.latency_s**along
    apart = log2(ranks / first), log2(last / ranks)
    octaves = apart[0] * apart[1] / (apart[0] + apart[1]) + nearest
    return Transfer(latency + wires[0] ** (1 - inverse) * wires[1] ** inverse, latency, octaves)


def _wire_seconds(
    op: CollectiveOp, series: Series, group: Group, num_bytes: Floats, topology: Topology | None
) -> Floats:
    """Seconds above the latency that a measured group takes for as many bytes through its busiest port."""
    here, there = _port_share(op, group, series.group, topology), _port_share(op, series.group, series.group, topology)
    wire: Floats = np.maximum(series.at(num_bytes * here / there) - series.latency_s, 0.0)
    return wire


def _port_share(op: CollectiveOp, group: Group, measured: Group, topology: Topology | None) -> float:
    """Bytes through the busiest port per byte, if the group runs the algorithm that the measured one does."""
    if group.num_nodes > 1:
        return port_share(op, group, algorithm="tree" if measured.num_nodes == 2 else "ring")
    if topology is None:
        return port_share(op, group)
    devices = tuple(range(0, group.num_ranks * group.stride, group.stride))
    algorithm, count = topology.lanes_among(devices)
    return port_share(op, group, num_lanes=count, algorithm=algorithm)


def _sharing_octaves(series: Series, group: Group) -> float:
    return abs(log2(series.group.num_sharing / group.num_sharing))


def _remoteness(series: Series, group: Group) -> tuple[float, int]:
    """How far a series is from a group: octaves of ranks and nodes, then a different stride."""
    here = series.group
    octaves = abs(log2(here.num_ranks / group.num_ranks)) + abs(log2(here.num_nodes / group.num_nodes))
    return octaves, abs(here.stride - group.stride)


def with_interval(
    seconds: Floats, latency_s: float | Floats, scale: ErrorScale, stretch: float, basis: tuple[Basis, ...]
) -> Predictions:
    """Predictions with the interval of the regime: latency where it is more than half of the time."""
    in_latency = latency_s > seconds / 2
    low = np.where(in_latency, scale.latency.low, scale.bandwidth.low) ** stretch
    high = np.where(in_latency, scale.latency.high, scale.bandwidth.high) ** stretch
    return Predictions(seconds=seconds, low_s=seconds * low, high_s=seconds * high, basis=basis)
