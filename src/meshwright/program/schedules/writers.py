"""Compiled loops of rule-based schedules, which write the orders of all ranks at once.

in turn        a rank forwards until it is a given number of microbatches ahead of its backwards, then alternates
               backwards and forwards; step s of its forwards is chunk (s // k) mod v, microbatch
               (s // (k·v))·k + s mod k, of v chunks and rounds of k microbatches; backwards are the same with the
               chunks in reverse
zero bubble    forwards ahead, then gradients of inputs and forwards in turn; gradients of weights are deferred
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.program.schedules.columns import OrderColumns, RankOrders
from meshwright.program.schedules.layouts import Seats
from meshwright.spec.instructions import Opcode

Ids = NDArray[np.int64]
Column = NDArray[np.int32]
Rows = tuple[NDArray[np.int8], Column, Column]

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (
    int(opcode) for opcode in (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
)


def write_in_turn(seats: Seats, ahead: Ids, round_size: Ids, *, last_first: bool = False) -> RankOrders:
    """Write orders of at most ``ahead`` forwards ahead, in rounds of ``round_size`` microbatches, both by rank.

    ``last_first``: backwards begin with the last microbatch of a round.
    """
    orders = _empty(seats, 2)
    dealt = seats.firsts, seats.steps
    _write_in_turn(orders.offsets, ahead, round_size, last_first, seats.stages, dealt, _rows(orders))
    return orders


def write_zero_bubble(seats: Seats, ahead: Ids, behind: Ids) -> RankOrders:
    """Write orders with forwards ``ahead`` and gradients of weights ``behind``, by rank."""
    orders = _empty(seats, 3)
    _write_zero_bubble(
        orders.offsets, ahead, behind, seats.stages[:, 0].copy(), (seats.firsts, seats.steps), _rows(orders)
    )
    return orders


def _empty(seats: Seats, parts: int) -> RankOrders:
    """Return room for ``parts`` computations of every microbatch and stage."""
    offsets = np.concatenate([[0], np.cumsum(parts * seats.stages.shape[1] * seats.counts)])
    count = int(offsets[-1])
    columns = OrderColumns(
        opcode=np.empty(count, np.int8),
        stage=np.empty(count, np.int32),
        microbatch=np.empty(count, np.int32),
        joint=np.zeros(count, np.bool_),
    )
    return RankOrders(offsets=offsets, columns=columns)


def _rows(orders: RankOrders) -> Rows:
    columns = orders.columns
    return columns.opcode, columns.stage, columns.microbatch


@compiled
def _write_in_turn(
    offsets: Ids, ahead: Ids, round_size: Ids, last_first: bool, stages: Column, dealt: tuple[Ids, Ids], rows: Rows
) -> None:
    opcode, stage, microbatch = rows
    firsts, steps = dealt
    chunks = stages.shape[1]
    # For forwards and for backwards: how many are done; chunk and first microbatch of the round, and place in it.
    done, chunk, begin, place = (
        np.empty(2, np.int64),
        np.empty(2, np.int64),
        np.empty(2, np.int64),
        np.empty(2, np.int64),
    )
    for rank in range(len(ahead)):
        first, step, size, total = firsts[rank], steps[rank], round_size[rank], (offsets[rank + 1] - offsets[rank]) // 2
        done[:], chunk[:], begin[:], place[:] = 0, 0, 0, 0
        for i in range(offsets[rank], offsets[rank + 1]):
            way = 0 if done[0] < min(total, done[1] + ahead[rank]) else 1
            own = size - 1 - place[way] if last_first and way else place[way]
            opcode[i] = _BACKWARD if way else _FORWARD
            stage[i] = stages[rank, chunks - 1 - chunk[way] if way else chunk[way]]
            microbatch[i] = first + (begin[way] + own) * step
            done[way] += 1
            place[way] += 1
            if place[way] == size:
                place[way] = 0
                chunk[way] += 1
                if chunk[way] == chunks:
                    chunk[way] = 0
                    begin[way] += size


@compiled
def _write_zero_bubble(
    offsets: Ids, ahead: Ids, behind: Ids, stages: Column, dealt: tuple[Ids, Ids], rows: Rows
) -> None:
    opcode, stage, microbatch = rows
    firsts, steps = dealt
    for rank in range(len(ahead)):
        first, step, total = firsts[rank], steps[rank], (offsets[rank + 1] - offsets[rank]) // 3
        forwards = inputs = weights = 0
        for i in range(offsets[rank], offsets[rank + 1]):
            if forwards < min(total, inputs + ahead[rank]) and weights >= inputs - behind[rank]:
                opcode[i], microbatch[i] = _FORWARD, first + forwards * step
                forwards += 1
            elif inputs < total and weights >= inputs - behind[rank]:
                opcode[i], microbatch[i] = _INPUT, first + inputs * step
                inputs += 1
            else:
                opcode[i], microbatch[i] = _WEIGHT, first + weights * step
                weights += 1
            stage[i] = stages[rank]
