"""Communication inside and between teams, and its costs.

A team is the w devices that compute one replica of a stage together (`spec.teams`). The devices of team r are r·w + i,
for the positions i from 0 to w - 1.

    messages        between teams r and s: w pairs of devices (r·w + i, s·w + i), all at once
    gradients       groups of devices whose positions differ only in the mesh axes of the reduction (`summing_axes`),
                    all groups at once; the axes are context and expert, for parameters of experts context only
    inside          the devices of a mesh axis, at the same time as all groups of this axis on the same nodes; if nodes
                    differ, the slowest

Ring attention: with c ranks, a rank computes c parts of its attention one after the other. Meanwhile, its neighbour
sends the keys and values of the next part: t/c + (c - 1)·max(t/c, send) (Liu et al., Ring Attention, 2023).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.spec import Cluster, Graph, MeasurementError, Sharding
from meshwright.spec.exchange import Axis, summing_axes
from meshwright.spec.sharding import AXES

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from meshwright.cost.collectives import CollectiveOp
    from meshwright.cost.collectives.collective_costs import CollectiveCosts
    from meshwright.cost.costs import End, Floats

Group = tuple[int, ...]
Axes = tuple[Axis, ...]
# Axes whose ranks replicate most parameters, and reduce their gradients.
REPLICATING: Axes = ("context", "expert")
_FORWARD, _BACKWARD = 0, 1


class OpExchange(NamedTuple):
    """Seconds of communication inside an op of a local graph, with their interval.

    ``at``: index of the op. ``in_backward``: whether it communicates in the backward. ``ring``: the number of ranks of
    a ring whose messages overlap the op's computation; 0 if the seconds are added to the op's.
    """

    at: int
    in_backward: bool
    seconds: float
    low_s: float
    high_s: float
    ring: int = 0


def add_exchanges(table: Floats, exchanges: Sequence[OpExchange], seconds: Floats) -> None:
    """Add the ``seconds`` of the exchanges, shape (exchanges,), to the seconds of their ops in ``table``, in place.

    ``table`` has one row per op; its first two columns are forward and backward.
    """
    sent: dict[tuple[int, int, int], float] = {}
    for item, taken_s in zip(exchanges, seconds.tolist(), strict=True):
        column = _BACKWARD if item.in_backward else _FORWARD
        if item.ring:
            sent[item.at, column, item.ring] = sent.get((item.at, column, item.ring), 0.0) + taken_s
        else:
            table[item.at, column] += taken_s
    for (at, column, num_ranks), taken_s in sent.items():
        table[at, column] = ring_attention_seconds(table[at, column], taken_s / (num_ranks - 1), num_ranks)


def ring_attention_seconds(alone_s: float, send_s: float, num_ranks: int) -> float:
    """Return the seconds of ring attention: each part is computed while the operands of the next part are sent.

    ``alone_s``: seconds of all parts without communication; ``send_s``: seconds of one message.
    """
    part_s = alone_s / num_ranks
    return part_s + (num_ranks - 1) * max(part_s, send_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeamCosts:
    """The costs of communication inside and between the teams of a sharding.

    ``costs``: costs of collectives between devices. ``float_bytes``: bytes of a floating-point element, None under
    autocast. ``end``: see `CostModel.at_end`.
    """

    costs: CollectiveCosts
    sharding: Sharding
    float_bytes: int | None
    end: End | None = None
    _kept: dict[tuple[str, Axes, int], tuple[float, float, float]] = field(init=False, repr=False, default_factory=dict)
    _groups: dict[Axes, list[list[Group]]] = field(init=False, repr=False, default_factory=dict)

    def groups(
        self, op: CollectiveOp, teams: Sequence[int], concurrent: Sequence[Sequence[int]], axes: Axes = REPLICATING
    ) -> tuple[Group, tuple[Group, ...]]:
        """Return one group of devices in which teams communicate, and the groups that communicate at the same time.

        ``teams``: the teams of the collective; ``concurrent``: other sets of teams that run the same collective at
        once. ``axes``: the mesh axes inside teams over which the collective runs, too.
        """
        if self.sharding.width == 1:
            return tuple(teams), tuple(map(tuple, concurrent))
        over = () if op == "send" else axes
        first, *others = [group for item in (teams, *concurrent) for group in spread_teams(item, self.sharding, over)]
        return first, tuple(others)

    def op_exchanges(self, graph: Graph, batch_size: int) -> list[OpExchange]:
        """Return the communication over mesh axes inside the ops of a local graph, for one microbatch.

        Raises MeasurementError if the graph is sharded over an axis which has one rank in this sharding.
        """
        found = []
        for item in graph.collectives:
            if item.phase == "step":
                continue
            num_bytes = item.num_bytes(graph, batch_size, self.float_bytes)
            each = self._inside(item.kind, (item.axis,), num_bytes, graph.name)
            ring = self.sharding.size(item.axis) if item.kind == "send" else 0
            seconds, low_s, high_s = (item.count * value for value in each)
            found.append(OpExchange(item.at, item.phase == "backward", seconds, low_s, high_s, ring=ring))
        return found

    def prepare(self, graph: Graph, batch_sizes: Sequence[int]) -> None:
        """Compute and cache the costs of the collectives of `op_exchanges` for several batch sizes at once."""
        wanted: dict[tuple[CollectiveOp, Axes], set[int]] = {}
        for item in graph.collectives:
            if item.phase != "step":
                sizes = {item.num_bytes(graph, size, self.float_bytes) for size in batch_sizes}
                wanted.setdefault((item.kind, (item.axis,)), set()).update(sizes)
        for (kind, axes), sizes in wanted.items():
            missing = sorted(size for size in sizes if (kind, axes, size) not in self._kept)
            if missing and math.prod(map(self.sharding.size, axes)) > 1:
                self._predict(kind, axes, missing)

    def step_seconds(self, graph: Graph, parameter_ids: Sequence[int], elsewhere: Set[int]) -> float:
        """Return the seconds per step in which the devices of a team reduce gradients among themselves.

        ``parameter_ids``: the parameters of the stage. ``elsewhere``: parameters whose gradients are reduced together
        with those of the replicas, so that only their reduction over the tensor axis counts here.
        """
        held = set(parameter_ids)
        sizes: Counter[Axes] = Counter()
        for item in graph.collectives:
            if item.phase == "step" and item.tensor in held and item.axis == "tensor":
                sizes["tensor",] += item.num_bytes(graph, 1, self.float_bytes)
        for tensor, axes in summing_axes(graph).items():
            if tensor in held and tensor not in elsewhere:
                sizes[axes] += graph.tensors[tensor].num_bytes(1, self.float_bytes)
        at = {None: 0, "low": 1, "high": 2}[self.end]
        return sum(self._inside("all_reduce", axes, size, graph.name)[at] for axes, size in sizes.items())

    def _inside(self, kind: CollectiveOp, axes: Axes, num_bytes: int, graph_name: str) -> tuple[float, float, float]:
        """Return the seconds of a collective over axes and their interval, on the slowest nodes."""
        if math.prod(map(self.sharding.size, axes)) == 1:
            raise MeasurementError(
                f"Graph {graph_name!r} is the local graph of one rank of the {axes[0]} axis, but this cost model has "
                "costs for whole graphs. Use `CostModel.for_teams` with the graph's sharding."
            )
        key = (kind, axes, num_bytes)
        if key not in self._kept:
            self._predict(kind, axes, [num_bytes])
        return self._kept[key]

    def _predict(self, kind: CollectiveOp, axes: Axes, sizes: Sequence[int]) -> None:
        """Store the seconds of a collective over axes, for each size on the slowest nodes."""
        if axes not in self._groups:
            self._groups[axes] = axis_groups(self.costs.cluster, self.sharding, axes)
        rows: list[list[tuple[float, float, float]]] = [[] for _ in sizes]
        for groups in self._groups[axes]:
            first, *others = [group[:2] for group in groups] if kind == "send" else groups
            told = self.costs.predict(kind, first, np.array(sizes, np.float64), tuple(others))
            for row, each in zip(rows, zip(told.seconds, told.low_s, told.high_s, strict=True), strict=True):
                row.append((float(each[0]), float(each[1]), float(each[2])))
        for size, row in zip(sizes, rows, strict=True):
            self._kept[kind, axes, size] = max(row)


def spread_teams(teams: Sequence[int], sharding: Sharding, axes: Axes) -> list[Group]:
    """Return the groups of devices in which teams communicate.

    A group has, of each team, the devices whose positions differ only in ``axes``.
    """
    return [
        tuple(team * sharding.width + place for team in teams for place in places) for places in _places(sharding, axes)
    ]


def axis_groups(cluster: Cluster, sharding: Sharding, axes: Axes) -> list[list[Group]]:
    """Return lists of groups over ``axes`` that communicate at the same time, one list for each kind of nodes.

    The time of the first group of a list is that of the list; the others share its nodes.
    """
    columns, width = cluster.columns(), sharding.width
    places = np.array(_places(sharding, axes))
    groups = (np.arange(cluster.num_ranks // width)[:, None, None] * width + places).reshape(-1, places.shape[1])
    firsts = np.unique(columns.node_kind[groups], axis=0, return_index=True)[1]
    found: list[list[Group]] = []
    for first in np.sort(firsts).tolist():
        nodes = columns.node[groups[first]]
        near = np.unique(np.flatnonzero(np.isin(columns.node, nodes)) // width)
        there = (near[:, None] * len(places) + np.arange(len(places))).reshape(-1)
        beside = there[np.isin(columns.node[groups[there]], nodes).any(axis=1) & (there != first)]
        found.append([tuple(group) for group in groups[[first, *beside.tolist()]].tolist()])
    return found


@lru_cache(maxsize=64)
def _places(sharding: Sharding, axes: Axes) -> list[Group]:
    """Return the places in a team, in groups that differ only in ``axes``."""
    found: dict[Group, list[int]] = {}
    for place in range(sharding.width):
        others = (place // sharding.stride(axis) % sharding.size(axis) for axis in AXES if axis not in axes)
        found.setdefault(tuple(others), []).append(place)
    return [tuple(group) for group in found.values()]
