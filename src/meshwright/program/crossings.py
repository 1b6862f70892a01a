"""The messages between the stages of a plan, and their sends and receives in a program.

A channel between two stages (`spec.slices`) is a route forwards, and one backwards if gradients come back. `transfers`
decides when each message is sent and received; this module gives it its bytes and its pair of ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.autocast import as_computed
from meshwright.program.builder import ProgramBuilder
from meshwright.program.schedules import RankOrders
from meshwright.program.transfers import Computations, Sends, StageRoutes, find_pairs, lay_out_transfers
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.slices import StageSlice, slice_graph

Ids = NDArray[np.int64]


class Crossings(NamedTuple):
    """The routes between stages, and for each route its bytes and whether it carries gradients."""

    routes: StageRoutes
    num_bytes: Ids
    is_gradient: NDArray[np.bool_]

    def needs(self, backward: bool, stage: int) -> list[int]:
        """Return the stages that must have computed a microbatch before a stage can."""
        routes = self.routes
        end = stage + backward * (len(routes.arriving_offsets) // 2)
        arriving = routes.arriving[routes.arriving_offsets[end] : routes.arriving_offsets[end + 1]]
        return [int(source) for source in routes.source[arriving]]


def find_crossings(plan: Plan | Placement, graph: Graph, stages: tuple[StageSlice, ...]) -> Crossings:
    """Return what is sent after each stage's forwards and backwards, and what these must have received."""
    graph = as_computed(graph, plan.workload.numbers)
    size, float_bytes = plan.microbatch_size, plan.workload.float_bytes
    if isinstance(plan, Plan):
        return _crossings_of_cut(graph, plan.bounds, size, float_bytes)
    return _join_channels(graph, stages, size, float_bytes)


# Cached, because plans with the same stage bounds differ only in replicas, schedules and exchange.
@lru_cache(maxsize=16)
def _crossings_of_cut(
    graph: Graph, bounds: tuple[tuple[int, int], ...], size: int, float_bytes: int | None
) -> Crossings:
    return _join_channels(graph, slice_graph(graph, bounds), size, float_bytes)


def _join_channels(graph: Graph, stages: tuple[StageSlice, ...], size: int, float_bytes: int | None) -> Crossings:
    num_stages = len(stages)
    rows: list[tuple[int, int, int, bool]] = []
    leaving: list[list[int]] = [[] for _ in range(2 * num_stages)]
    arriving: list[list[int]] = [[] for _ in range(2 * num_stages)]
    for channel in (channel for stage in stages for channel in stage.outgoing):
        ways = [(channel.source, channel.target, channel.forward_bytes(graph, size, float_bytes), False)]
        if channel.gradients:
            ways.append((channel.target, channel.source, channel.backward_bytes(graph, size, float_bytes), True))
        for source, target, num_bytes, is_gradient in ways:
            leaving[source + num_stages * is_gradient].append(len(rows))
            arriving[target + num_stages * is_gradient].append(len(rows))
            rows.append((source, target, num_bytes, is_gradient))
    table = np.array(rows, np.int64).reshape(-1, 4)
    routes = StageRoutes(
        table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), *_ragged(leaving), *_ragged(arriving)
    )
    return Crossings(routes, table[:, 2], table[:, 3].astype(bool))


def _ragged(lists: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    offsets = np.cumsum([0, *(len(items) for items in lists)])
    return offsets.astype(np.int32), np.array([item for items in lists for item in items], np.int32)


def join_orders(plan: Plan | Placement, orders: RankOrders, computed: Ids) -> Computations:
    """Return the computations of all ranks with their handles, and the ranks of each stage's replicas."""
    columns = orders.columns
    replica_offsets, replicas = _ragged([list(stage.ranks) for stage in plan.stages])
    turn_offsets, turns = _ragged([list(stage.turns) for stage in plan.stages])
    turns += np.repeat(replica_offsets[:-1], np.diff(turn_offsets))
    return Computations(
        offsets=orders.offsets,
        handle=computed,
        opcode=columns.opcode,
        stage=columns.stage,
        microbatch=columns.microbatch,
        joint=columns.joint,
        replica_offsets=replica_offsets,
        replicas=replicas,
        turn_offsets=turn_offsets,
        turns=turns,
    )


def append_orders(builder: ProgramBuilder, plan: Plan | Placement, orders: RankOrders) -> Computations:
    """Append the computations of all ranks."""
    columns = orders.columns
    computed = builder.extend(
        orders.offsets, "compute", opcode=columns.opcode, stage=columns.stage, microbatch=columns.microbatch
    )
    return join_orders(plan, orders, computed)


def append_transfers(builder: ProgramBuilder, computations: Computations, crossings: Crossings) -> None:
    """Append sends after the computations that produce their values, receives before those that consume them."""
    routes = crossings.routes
    sends, receives = lay_out_transfers(computations, routes)
    groups = _number_groups(builder, sends)
    sent = builder.extend(
        sends.offsets,
        "send",
        form=sends.route,
        opcode=np.where(crossings.is_gradient, Opcode.SEND_GRADIENT, Opcode.SEND_ACTIVATION),
        stage=routes.source,
        microbatch=sends.microbatch,
        version=-1,
        peer=routes.target,
        num_bytes=crossings.num_bytes,
        group=groups,
    )
    received = builder.extend(
        receives.offsets,
        "receive",
        form=receives.route,
        opcode=np.where(crossings.is_gradient, Opcode.RECEIVE_GRADIENT, Opcode.RECEIVE_ACTIVATION),
        stage=routes.target,
        microbatch=receives.microbatch,
        version=-1,
        peer=routes.source,
        num_bytes=crossings.num_bytes,
        group=groups[receives.send],
    )
    builder.wait_each(sent, sends.after)
    builder.wait_each(received, sent[receives.send])
    gated = np.flatnonzero(receives.gate >= 0)
    builder.wait_each(received[gated], receives.gate[gated])
    builder.wait_each(receives.before, received)


def _number_groups(builder: ProgramBuilder, sends: Sends) -> NDArray[np.int32]:
    """Return the group of each message."""
    sources, targets, number = find_pairs(sends)
    pairs = zip(sources.tolist(), targets.tolist(), strict=True)
    return np.array([builder.group(pair) for pair in pairs], np.int32)[number]
