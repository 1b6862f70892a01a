"""From the orders of all ranks to columns: computations, what each sends and must have received, who waits for whom.

Streams of a rank: `compute` in the order of its schedule, `send` in the order in which values are made, `receive` in
the order in which each sender sends (transports without tags deliver so). A receive is issued `RECEIVE_LOOKAHEAD`
computations before its consumer, so that its transfer overlaps with computation while few buffers are held; where a
later message of the same sender is needed earlier, everything before it comes that early too. What a rank hands to
itself is not sent: its order has the maker before the consumer.

All loops are compiled: a pipeline of a trillion parameters has 200,000 instructions, and is laid out in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compiled import compiled
from meshwright.spec.instructions import Opcode

Ids = NDArray[np.int64]
Column = NDArray[np.int32]

# Compute instructions that may run while a receive is under way: two hide a transfer behind the instruction before
# the consumer even when the sender was late, and hold at most two received microbatches.
RECEIVE_LOOKAHEAD = 2

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (
    int(opcode) for opcode in (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
)


class Routes(NamedTuple):
    """What stages send each other with every microbatch: columns of shape (routes,), and which leave and arrive where.

    ``leaving_offsets`` and ``arriving_offsets``, of shape (2·stages + 1,), index the routes that leave after, or must
    have arrived before, the forwards (first half) and the backwards (second half) of each stage.
    """

    source: Column
    target: Column
    leaving_offsets: Column
    leaving: Column
    arriving_offsets: Column
    arriving: Column


class Computations(NamedTuple):
    """Computations of all ranks, rank by rank: rank r has ``offsets[r]:offsets[r + 1]``.

    ``replica_offsets`` and ``replicas``: the ranks of each stage, microbatch m on the (m mod R)-th. ``joint``: see
    `schedules.OrderColumns`.
    """

    offsets: Ids
    opcode: NDArray[np.int8]
    stage: Column
    microbatch: Column
    joint: NDArray[np.bool_]
    replica_offsets: Column
    replicas: Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Sends and receives of all ranks, rank by rank; each column of shape (sends,) or (receives,).

    ``send_after`` and ``receive_before`` are the places of the maker and of the consumer among all computations,
    ``receive_gate`` the place among its rank's that must have begun to be near (-1: at once), ``receive_of`` the send.
    """

    send_offsets: Ids
    send_route: Column
    send_microbatch: Column
    send_after: Ids
    receive_offsets: Ids
    receive_route: Column
    receive_before: Ids
    receive_after: Ids
    receive_of: Ids


def lay_out_transfers(computations: Computations, routes: Routes, num_microbatches: int) -> Transfers:
    """Who sends and receives what, and when."""
    num_ranks = len(computations.offsets) - 1
    num_sends, num_receives = np.zeros(num_ranks + 1, np.int64), np.zeros(num_ranks + 1, np.int64)
    _count(computations, routes, num_sends[1:], num_receives[1:])
    send_offsets, receive_offsets = np.cumsum(num_sends), np.cumsum(num_receives)
    send_route, send_microbatch = np.empty((2, send_offsets[-1]), np.int32)
    send_after = np.empty(send_offsets[-1], np.int64)
    sent = np.full((len(routes.source), num_microbatches), -1, np.int64)
    _send(computations, routes, send_offsets, send_route, send_microbatch, send_after, sent)
    receive_route, (before, after, of) = (
        np.empty(receive_offsets[-1], np.int32),
        np.empty((3, receive_offsets[-1]), np.int64),
    )
    _receive(computations, routes, sent, receive_offsets, receive_route, before, after, of)
    return Transfers(
        send_offsets=send_offsets,
        send_route=send_route,
        send_microbatch=send_microbatch,
        send_after=send_after,
        receive_offsets=receive_offsets,
        receive_route=receive_route,
        receive_before=before,
        receive_after=after,
        receive_of=of,
    )


@compiled
def _end(opcode: int, stage: int, num_stages: int) -> int:
    """Which end of a stage a computation uses: of its forwards, of its backwards, or none (-1)."""
    if opcode == _FORWARD:
        return stage
    return -1 if opcode == _WEIGHT else num_stages + stage


@compiled
def _rank_of(computations: Computations, stage: int, microbatch: int) -> int:
    first = computations.replica_offsets[stage]
    return int(computations.replicas[first + microbatch % (computations.replica_offsets[stage + 1] - first)])


@compiled
def _count(computations: Computations, routes: Routes, num_sends: Ids, num_receives: Ids) -> None:
    num_stages = len(computations.replica_offsets) - 1
    for rank in range(len(num_sends)):
        for i in range(computations.offsets[rank], computations.offsets[rank + 1]):
            end = _end(computations.opcode[i], computations.stage[i], num_stages)
            if end < 0:
                continue
            for q in range(routes.leaving_offsets[end], routes.leaving_offsets[end + 1]):
                target = _rank_of(computations, routes.target[routes.leaving[q]], computations.microbatch[i])
                num_sends[rank] += target != rank
            for q in range(routes.arriving_offsets[end], routes.arriving_offsets[end + 1]):
                source = _rank_of(computations, routes.source[routes.arriving[q]], computations.microbatch[i])
                num_receives[rank] += source != rank


@compiled
def _send(
    computations: Computations,
    routes: Routes,
    offsets: Ids,
    send_route: Column,
    send_microbatch: Column,
    send_after: Ids,
    sent: Ids,
) -> None:
    num_stages = len(computations.replica_offsets) - 1
    for rank in range(len(offsets) - 1):
        place = offsets[rank]
        for i in range(computations.offsets[rank], computations.offsets[rank + 1]):
            end = _end(computations.opcode[i], computations.stage[i], num_stages)
            if end < 0:
                continue
            for q in range(routes.leaving_offsets[end], routes.leaving_offsets[end + 1]):
                route, microbatch = routes.leaving[q], computations.microbatch[i]
                if _rank_of(computations, routes.target[route], microbatch) != rank:
                    send_route[place], send_microbatch[place], sent[route, microbatch] = route, microbatch, place
                    send_after[place] = i + computations.joint[i]
                    place += 1


@compiled
def _receive(
    computations: Computations,
    routes: Routes,
    sent: Ids,
    offsets: Ids,
    receive_route: Column,
    before: Ids,
    after: Ids,
    of: Ids,
) -> None:
    num_stages, num_ranks = len(computations.replica_offsets) - 1, len(offsets) - 1
    most = 0
    for rank in range(num_ranks):
        most = max(most, offsets[rank + 1] - offsets[rank])
    sender, gate = np.empty(most, np.int64), np.empty(most, np.int64)
    for rank in range(num_ranks):
        first, count = offsets[rank], 0
        in_order, latest = True, np.full(num_ranks, -1, np.int64)
        begin = computations.offsets[rank]
        for i in range(begin, computations.offsets[rank + 1]):
            end = _end(computations.opcode[i], computations.stage[i], num_stages)
            if end < 0:
                continue
            for q in range(routes.arriving_offsets[end], routes.arriving_offsets[end + 1]):
                route, microbatch = routes.arriving[q], computations.microbatch[i]
                source = _rank_of(computations, routes.source[route], microbatch)
                if source == rank:
                    continue
                send = sent[route, microbatch]
                in_order = in_order and send > latest[source]
                latest[source] = send
                # Of two that run together the first waits for what the second needs.
                begun = i - (i > begin and computations.joint[i - 1])
                receive_route[first + count], before[first + count], of[first + count] = route, begun, send
                sender[count], gate[count] = source, begun
                count += 1
        if not in_order:
            _sort_by_sender(
                receive_route[first : first + count],
                before[first : first + count],
                of[first : first + count],
                sender[:count],
                gate[:count],
            )
        for k in range(count):
            ahead = gate[k] - begin - 1 - RECEIVE_LOOKAHEAD
            after[first + k] = begin + ahead if ahead >= 0 else -1


@compiled
def _sort_by_sender(route: Column, before: Ids, of: Ids, sender: Ids, gate: Ids) -> None:
    """Each sender's messages in its order of sending, all of them by when they, or any behind them, are needed."""
    count = len(route)
    order = np.argsort(of, kind="mergesort")
    order = order[np.argsort(sender[order], kind="mergesort")]
    needed = gate[order]
    for k in range(count - 2, -1, -1):
        if sender[order[k]] == sender[order[k + 1]]:
            needed[k] = min(needed[k], needed[k + 1])
    final = np.argsort(needed, kind="mergesort")
    order, needed = order[final], needed[final]
    route[:], before[:], of[:], gate[:] = route[order], before[order], of[order], needed
