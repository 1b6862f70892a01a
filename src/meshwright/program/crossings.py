"""What crosses between the stages of a plan, and its sends and receives in a program.

A channel between two stages (`spec.slices`) is a route forwards, and one backwards if gradients come back. `transfers`
says when each message leaves and arrives; here it gets its bytes and its pair of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.builder import ProgramBuilder
from meshwright.program.schedules import OrderColumns
from meshwright.program.transfers import Computations, Routes, lay_out_transfers
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.slices import StageSlice

Ids = NDArray[np.int64]


class Crossings(NamedTuple):
    """What crosses between stages: its routes, and of each route its bytes and whether it carries gradients."""

    routes: Routes
    num_bytes: Ids
    is_gradient: NDArray[np.bool_]

    def needs(self, backward: bool, stage: int) -> list[int]:
        """The stages that must have computed a microbatch before a stage can."""
        routes = self.routes
        end = stage + backward * (len(routes.arriving_offsets) // 2)
        arriving = routes.arriving[routes.arriving_offsets[end] : routes.arriving_offsets[end + 1]]
        return [int(source) for source in routes.source[arriving]]


def find_crossings(plan: Plan | Placement, graph: Graph, stages: tuple[StageSlice, ...]) -> Crossings:
    """What goes out after each stage's forwards and backwards, and what they must have received."""
    size, float_bytes, num_stages = plan.microbatch_size, plan.workload.float_bytes, len(stages)
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
    routes = Routes(table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), *_ragged(leaving), *_ragged(arriving))
    return Crossings(routes, table[:, 2], table[:, 3].astype(bool))


def _ragged(lists: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    offsets = np.cumsum([0, *(len(items) for items in lists)])
    return offsets.astype(np.int32), np.array([item for items in lists for item in items], np.int32)


def join_orders(plan: Plan | Placement, orders: tuple[OrderColumns, ...]) -> Computations:
    """The computations of all ranks, one behind the other."""
    replica_offsets, replicas = _ragged([list(stage.ranks) for stage in plan.stages])
    return Computations(
        offsets=np.cumsum([0, *(len(order) for order in orders)]).astype(np.int64),
        opcode=np.concatenate([order.opcode for order in orders]),
        stage=np.concatenate([order.stage for order in orders]),
        microbatch=np.concatenate([order.microbatch for order in orders]),
        joint=np.concatenate([order.joint for order in orders]),
        replica_offsets=replica_offsets,
        replicas=replicas,
    )


def append_orders(
    builder: ProgramBuilder, plan: Plan | Placement, orders: tuple[OrderColumns, ...]
) -> tuple[Computations, Ids]:
    """Write down what all ranks compute; their computations and the handles of these."""
    computations = join_orders(plan, orders)
    computed = builder.extend(
        np.repeat(np.arange(plan.num_ranks), np.diff(computations.offsets)),
        "compute",
        opcode=computations.opcode,
        stage=computations.stage,
        microbatch=computations.microbatch,
    )
    return computations, computed


def append_transfers(
    builder: ProgramBuilder, plan: Plan | Placement, computations: Computations, computed: Ids, crossings: Crossings
) -> None:
    """Sends after what makes their values, receives before what consumes them."""
    found = lay_out_transfers(computations, crossings.routes, int(computations.microbatch.max(initial=-1)) + 1)
    ranks = np.arange(plan.num_ranks)
    senders, receivers = np.repeat(ranks, np.diff(found.send_offsets)), np.repeat(ranks, np.diff(found.receive_offsets))
    partners = np.empty(len(senders), np.int64)
    partners[found.receive_of] = receivers
    groups = _number_pairs(builder, plan.num_ranks, senders, partners)
    source, target = crossings.routes.source, crossings.routes.target
    sends = builder.extend(
        senders,
        "send",
        opcode=np.where(crossings.is_gradient, Opcode.SEND_GRADIENT, Opcode.SEND_ACTIVATION)[found.send_route],
        stage=source[found.send_route],
        microbatch=found.send_microbatch,
        version=-1,
        peer=target[found.send_route],
        num_bytes=crossings.num_bytes[found.send_route],
        group=groups,
    )
    receives = builder.extend(
        receivers,
        "receive",
        opcode=np.where(crossings.is_gradient, Opcode.RECEIVE_GRADIENT, Opcode.RECEIVE_ACTIVATION)[found.receive_route],
        stage=target[found.receive_route],
        microbatch=found.send_microbatch[found.receive_of],
        version=-1,
        peer=source[found.receive_route],
        num_bytes=crossings.num_bytes[found.receive_route],
        group=groups[found.receive_of],
    )
    builder.wait_each(sends, computed[found.send_after])
    builder.wait_each(receives, sends[found.receive_of])
    gated = found.receive_after >= 0
    builder.wait_each(receives[gated], computed[found.receive_after[gated]])
    builder.wait_each(computed[found.receive_before], receives)


def _number_pairs(builder: ProgramBuilder, num_ranks: int, senders: Ids, receivers: Ids) -> Ids:
    """The group of each message."""
    keys = senders * num_ranks + receivers
    # Not `np.unique`: senders come in order, which a stable sort makes use of.
    order = np.argsort(keys, kind="stable")
    starts = np.diff(keys[order], prepend=-1) != 0
    pairs = [builder.group((key // num_ranks, key % num_ranks)) for key in keys[order[starts]].tolist()]
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.array(pairs, np.int64)[np.cumsum(starts) - 1]
    return numbers
