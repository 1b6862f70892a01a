"""The messages between the stages of a plan (`find_crossings`), and their sends and receives in a program.

A channel between two stages (`spec.slices`) has a route for activations, and a second route in the opposite direction
if gradients return. `find_crossings` lists the routes with their bytes; `lay_out_transfers` decides when each message
is sent and received.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost.autocast import as_computed
from meshwright.program.builder import ProgramBuilder
from meshwright.program.schedules import RankOrders
from meshwright.spec import Graph, Opcode, Placement, Plan, StageSlice, slice_graph

Ids = NDArray[np.int64]
Column = NDArray[np.int32]

# Compute instructions that may run while a receive is in flight: two hide a transfer behind the instruction before
# the consumer even if the sender was late, and hold at most two received microbatches.
RECEIVE_LOOKAHEAD = 2

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (
    int(opcode) for opcode in (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
)


class StageRoutes(NamedTuple):
    """The routes on which every microbatch sends one message, from stage ``source`` to ``target``; shape (routes,).

    End e is the forwards of stage e, end stages + e the backwards of stage e. The routes
    ``leaving[leaving_offsets[e]:leaving_offsets[e + 1]]`` leave after end e, and those of ``arriving`` must have
    arrived before it. Both offsets have shape (2·stages + 1,).
    """

    source: Column
    target: Column
    leaving_offsets: Column
    leaving: Column
    arriving_offsets: Column
    arriving: Column


class Computations(NamedTuple):
    """Computations of all ranks, rank by rank: rank r has ``offsets[r]:offsets[r + 1]``.

    ``handle`` is the instruction's handle in the `ProgramBuilder`; ``joint`` has the meaning that it has in
    `schedules.OrderColumns`. Stage s has the ranks ``replicas[replica_offsets[s]:replica_offsets[s + 1]]``.
    ``turns[turn_offsets[s]:turn_offsets[s + 1]]`` are indices into ``replicas``: they compute the stage's microbatches
    in turn, repeated cyclically.
    """

    offsets: Ids
    handle: Ids
    opcode: NDArray[np.int8]
    stage: Column
    microbatch: Column
    joint: NDArray[np.bool_]
    replica_offsets: Column
    replicas: Column
    turn_offsets: Column
    turns: Column


class Sends(NamedTuple):
    """Sends of all ranks: rank r has ``offsets[r]:offsets[r + 1]`` of the columns, which have shape (sends,).

    ``target`` is the rank that receives, ``after`` the handle of the computation that makes the value.
    """

    offsets: Ids
    route: Column
    microbatch: Column
    target: Column
    after: Ids


class Receives(NamedTuple):
    """Receives of all ranks: rank r has ``offsets[r]:offsets[r + 1]`` of the columns, which have shape (receives,).

    ``send`` is the index of the message in `Sends`, ``before`` the handle of the computation that needs the value.
    ``gate`` is the handle of the computation that must end before the receive is issued, -1 if there is no such limit.
    """

    offsets: Ids
    route: Column
    microbatch: Column
    send: Ids
    before: Ids
    gate: Ids


# Streams of a rank: `compute` in the order of its schedule, `send` in the order in which values are made, `receive` in
# the order in which each sender sends (transports without tags deliver in this order). A receive is issued
# `RECEIVE_LOOKAHEAD` computations before its consumer, so that its transfer overlaps with computation while few buffers
# are held; where a later message of the same sender is needed earlier, everything before it is issued that early, too.
# A value for a stage on the same rank is not sent, because the rank's order has its producer before its consumer.
#
# All loops are compiled: a pipeline of a trillion parameters has 200,000 instructions, and is laid out in milliseconds.
# Sorting uses numpy, because numba's sorts take seconds to compile.
def lay_out_transfers(computations: Computations, routes: StageRoutes) -> tuple[Sends, Receives]:
    """Return the sends and receives of all ranks, in order, with the handles for which they wait."""
    offsets = np.zeros((2, len(computations.offsets)), np.int64)
    leaving, arriving = _count(computations, routes)
    sends = Sends(
        offsets=offsets[0],
        route=np.empty(leaving, np.int32),
        microbatch=np.empty(leaving, np.int32),
        target=np.empty(leaving, np.int32),
        after=np.empty(leaving, np.int64),
    )
    sent = np.full((len(routes.source), int(computations.microbatch.max(initial=-1)) + 1), -1, np.int32)
    _send(computations, routes, sends, sent)
    receives = Receives(
        offsets=offsets[1],
        route=np.empty(arriving, np.int32),
        microbatch=np.empty(arriving, np.int32),
        send=np.empty(arriving, np.int64),
        before=np.empty(arriving, np.int64),
        gate=np.empty(arriving, np.int64),
    )
    sender, is_ordered = np.empty(arriving, np.int32), np.ones(len(computations.offsets) - 1, np.bool_)
    _receive(computations, routes, sent, receives, sender, is_ordered)
    if not is_ordered.all():
        _sort_by_sender(receives, sender, is_ordered)
    _look_ahead(computations, receives)
    return Sends(*_cut(sends)), Receives(*_cut(receives))


def _cut(columns: Sends | Receives) -> list[Any]:
    """Return the columns without the unused room of values that stay on their rank."""
    count = columns.offsets[-1]
    return [columns.offsets, *(column[:count] for column in columns[1:])]


@compiled
def _end(opcode: int, stage: int, num_stages: int) -> int:
    """Return the end of a stage that a computation uses: of its forwards, of its backwards, or -1 for neither."""
    if opcode == _FORWARD:
        return stage
    return -1 if opcode == _WEIGHT else num_stages + stage


@compiled
def _seat(turn_offsets: Column, turns: Column, stage: int, microbatch: int) -> int:
    """Return the index in ``replicas`` of the rank that computes a microbatch of a stage."""
    first = turn_offsets[stage]
    count = turn_offsets[stage + 1] - first
    if count == 1:  # a division would double the time of this function
        return int(turns[first])
    return int(turns[first + microbatch % count])


@compiled
def find_last_backwards(computations: Computations) -> Ids:
    """Return the index of the last backward of each stage on each of its ranks, in the order of ``replicas``.

    The result is -1 where there is no backward.
    """
    _, _, opcode, stage, microbatch, _, _, replicas, turn_offsets, turns = computations
    last = np.full(len(replicas), -1, np.int64)
    for i in range(len(opcode)):
        if opcode[i] == _BACKWARD or opcode[i] == _WEIGHT:
            last[_seat(turn_offsets, turns, stage[i], microbatch[i])] = i
    return last


@compiled
def find_first_forwards(computations: Computations) -> Ids:
    """Return the index of the first forward of each stage on each of its ranks, in the order of ``replicas``.

    The result is -1 where there is no forward.
    """
    _, _, opcode, stage, microbatch, _, _, replicas, turn_offsets, turns = computations
    first = np.full(len(replicas), -1, np.int64)
    for i in range(len(opcode) - 1, -1, -1):
        if opcode[i] == _FORWARD:
            first[_seat(turn_offsets, turns, stage[i], microbatch[i])] = i
    return first


@compiled
def find_pairs(sends: Sends) -> tuple[Column, Column, Column]:
    """Return the distinct (sender, receiver) pairs as two sorted columns, and the index of each send's pair."""
    num_ranks = len(sends.offsets) - 1
    sources, targets, number = np.empty_like(sends.target), np.empty_like(sends.target), np.empty_like(sends.target)
    met, number_of = np.full(num_ranks, -1, np.int32), np.empty(num_ranks, np.int32)
    count = 0
    for source in range(num_ranks):
        first = count
        for k in range(sends.offsets[source], sends.offsets[source + 1]):
            target = sends.target[k]
            if met[target] != source:
                met[target], place = source, count
                while place > first and targets[place - 1] > target:  # short, because a rank sends to few others
                    targets[place] = targets[place - 1]
                    place -= 1
                targets[place] = target
                count += 1
        for pair in range(first, count):
            sources[pair], number_of[targets[pair]] = source, pair
        for k in range(sends.offsets[source], sends.offsets[source + 1]):
            number[k] = number_of[sends.target[k]]
    return sources[:count], targets[:count], number


@compiled
def _count(computations: Computations, routes: StageRoutes) -> tuple[int, int]:
    """Count the messages that leave and arrive, including those that stay on their rank."""
    _, _, opcode, stage, _, _, replica_offsets, _, _, _ = computations
    _, _, leaving_offsets, _, arriving_offsets, _ = routes
    leaving = arriving = 0
    for i in range(len(opcode)):
        end = _end(opcode[i], stage[i], len(replica_offsets) - 1)
        if end >= 0:
            leaving += leaving_offsets[end + 1] - leaving_offsets[end]
            arriving += arriving_offsets[end + 1] - arriving_offsets[end]
    return leaving, arriving


@compiled
def _send(computations: Computations, routes: StageRoutes, sends: Sends, sent: Column) -> None:
    """Fill in the sends, and the index of each by route and microbatch."""
    # Arrays are taken out of the tuples once: loops that look them up there take several times as long.
    offsets, handle, opcode, stage, microbatch, joint, replica_offsets, replicas, turn_offsets, turns = computations
    _, target_stage, leaving_offsets, leaving, _, _ = routes
    send_offsets, send_route, send_microbatch, send_target, send_after = sends
    place = 0
    for rank in range(len(send_offsets) - 1):
        for i in range(offsets[rank], offsets[rank + 1]):
            end = _end(opcode[i], stage[i], len(replica_offsets) - 1)
            if end < 0:
                continue
            for q in range(leaving_offsets[end], leaving_offsets[end + 1]):
                route = leaving[q]
                target = replicas[_seat(turn_offsets, turns, target_stage[route], microbatch[i])]
                if target != rank:
                    send_route[place], send_microbatch[place], send_target[place] = route, microbatch[i], target
                    send_after[place], sent[route, microbatch[i]] = handle[i + joint[i]], place
                    place += 1
        send_offsets[rank + 1] = place


@compiled
def _receive(
    computations: Computations,
    routes: StageRoutes,
    sent: Column,
    receives: Receives,
    sender: Column,
    is_ordered: NDArray[np.bool_],
) -> None:
    """Fill in the receives in the order of their consumers, and mark the ranks where that is the order of sending.

    ``gate`` gets the indices of the consumers, ``sender`` the ranks that send.
    """
    offsets, handle, opcode, stage, microbatch, joint, replica_offsets, replicas, turn_offsets, turns = computations
    source_stage, _, _, _, arriving_offsets, arriving = routes
    receive_offsets, receive_route, receive_microbatch, receive_send, before, gate = receives
    num_ranks = len(receive_offsets) - 1
    latest = np.full(num_ranks, -1, np.int64)
    place = 0
    for rank in range(num_ranks):
        first, begin = place, offsets[rank]
        for i in range(begin, offsets[rank + 1]):
            end = _end(opcode[i], stage[i], len(replica_offsets) - 1)
            if end < 0:
                continue
            for q in range(arriving_offsets[end], arriving_offsets[end + 1]):
                route = arriving[q]
                source = replicas[_seat(turn_offsets, turns, source_stage[route], microbatch[i])]
                if source == rank:
                    continue
                send = sent[route, microbatch[i]]
                is_ordered[rank] = is_ordered[rank] and send > latest[source]
                latest[source] = send
                # Of two computations that run together, the first waits for what the second needs.
                begun = i - (i > begin and joint[i - 1])
                receive_route[place], receive_microbatch[place], receive_send[place] = route, microbatch[i], send
                before[place], gate[place], sender[place] = handle[begun], begun, source
                place += 1
        for k in range(first, place):
            latest[sender[k]] = -1
        receive_offsets[rank + 1] = place


def _sort_by_sender(receives: Receives, senders: Column, is_ordered: NDArray[np.bool_]) -> None:
    """Sort messages by when they, or later ones of the same sender, are needed; each sender's stay in sending order."""
    offsets, route, microbatch, send, before, gate = receives
    rank = np.repeat(np.arange(len(is_ordered)), np.diff(offsets))
    places = np.flatnonzero(~is_ordered[rank])
    order = places[np.lexsort((send[places], senders[places], rank[places]))]
    begins = (np.diff(rank[order], prepend=-1) != 0) | (np.diff(senders[order], prepend=-1) != 0)
    # Every sender's consumers are shifted beyond those of the senders before it, so that one running minimum suffices.
    shift = np.cumsum(begins) * (int(gate[places].max()) + 1)
    needed = np.minimum.accumulate((gate[order] + shift)[::-1])[::-1] - shift
    final = np.lexsort((needed, rank[order]))
    for column in (route, microbatch, send, before):
        column[places] = column[order[final]]
    gate[places] = needed[final]


def _look_ahead(computations: Computations, receives: Receives) -> None:
    """Replace the consumers in ``gate`` by the computations that must have ended before their receives are issued."""
    gate = receives.gate[: receives.offsets[-1]]
    ahead = gate - 1 - RECEIVE_LOOKAHEAD
    is_there = ahead >= np.repeat(computations.offsets[:-1], np.diff(receives.offsets))
    gate[:] = np.where(is_there, computations.handle[np.maximum(ahead, 0)], -1)


class Crossings(NamedTuple):
    """The routes between stages, and for each route the bytes of one message and whether it carries gradients."""

    routes: StageRoutes
    num_bytes: Ids
    is_gradient: NDArray[np.bool_]

    def needs(self, backward: bool, stage: int) -> list[int]:
        """Return the stages that must compute a microbatch before ``stage`` can, in the forward or the backward."""
        routes = self.routes
        end = stage + backward * (len(routes.arriving_offsets) // 2)
        arriving = routes.arriving[routes.arriving_offsets[end] : routes.arriving_offsets[end + 1]]
        return [int(source) for source in routes.source[arriving]]


def find_crossings(plan: Plan | Placement, graph: Graph, stages: tuple[StageSlice, ...]) -> Crossings:
    """Return the routes between stages, with the bytes of one microbatch's message on each."""
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
    """Return the computations of all ranks with their handles ``computed``, and the ranks of each stage's replicas."""
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
    """Append the computations of all ranks to their compute streams; return them with their handles."""
    columns = orders.columns
    computed = builder.extend(
        orders.offsets, "compute", opcode=columns.opcode, stage=columns.stage, microbatch=columns.microbatch
    )
    return join_orders(plan, orders, computed)


def append_transfers(builder: ProgramBuilder, computations: Computations, crossings: Crossings) -> None:
    """Append sends after the computations that make the values, and receives before the computations that need them."""
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
