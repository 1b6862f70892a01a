"""Schedules: one stage on every rank (gpipe, 1f1b, zb-h1, zb-h2), or several in turn (interleaved, looped-bfs).

    gpipe    all forwards, then all backwards in the order of the forwards         Huang et al., NeurIPS 2019
    1f1b     at most k microbatches in flight, then one forward, one backward      Narayanan et al., ICML 2021
    zb-h1    1f1b with backwards in two parts; the second parts wait until they fill what 1f1b leaves idle; memory of
             1f1b                                                                  Qi et al., ICLR 2024, section 2.2
    zb-h2    2(p - i) - 1 forwards ahead instead of p - i, gradients of weights 2i behind instead of i:
             no rank is idle between its first and last computation                section 2.3

PipeDream-Flush with replicated stages: k = ceil((R_s + R_(s+1) + …) / R_s), PipeDream's number of active minibatches
per replica; no order of such ranks can deadlock, because k_s R_s > (k_(s+1) - 1) R_(s+1).

If replicas have shares of the microbatches, a window limits the microbatches in flight of GPipe and 1F1B instead of a
count. (With equal replicas, 1F1B keeps k microbatches of a replica in flight.) Replica r of stage s computes m_r of the
M microbatches, one out of every M / m_r, and runs

    forward of m before backward of b  if  m - b < w_r = floor(M / m_r) + q     q = Σ later stages: max ceil(M / m_r)

that is, while b passes through the later stages and back, without a wait for any of their replicas. With equal shares
this is PipeDream's number of active minibatches. No order of such ranks can deadlock: assume that the forward of
microbatch m happens at time m and its backward at m + w_r; then every w_r of a stage is above q, and no w_r of the next
stage is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.program.schedules.seats import (
    OrderColumns,
    RankOrders,
    Seats,
    active_counts,
    check_alone,
    find_windows,
    join_ranks,
    make_columns,
    sit_alone,
    sit_in_turn,
    writes_orders,
)
from meshwright.spec import Opcode, Plan, PlanError

Ids = NDArray[np.int64]
Column = NDArray[np.int32]
Rows = tuple[NDArray[np.int8], Column, Column]

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (
    int(opcode) for opcode in (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
)


# A compiled loop writes the orders of all ranks at once. A rank forwards until it is a given number of microbatches
# ahead of its backwards, then alternates backwards and forwards; step s of its forwards is chunk (s // k) mod v,
# microbatch (s // (k·v))·k + s mod k, of v chunks and rounds of k microbatches; backwards are the same with the chunks
# in reverse.
def write_in_turn(seats: Seats, ahead: Ids, round_size: Ids, *, last_first: bool = False) -> RankOrders:
    """Return orders in which rank r runs at most ``ahead[r]`` forwards ahead of its backwards.

    Microbatches go through a rank's stages in rounds of ``round_size[r]``: first all of a round through one stage, then
    through the next. ``last_first``: the backwards of a round begin with its last microbatch.
    """
    orders = _empty(seats, 2)
    dealt = seats.firsts, seats.steps
    _write_in_turn(orders.offsets, ahead, round_size, last_first, seats.stages, dealt, _rows(orders))
    return orders


def write_zero_bubble(seats: Seats, ahead: Ids, behind: Ids) -> RankOrders:
    """Return orders with backwards in two parts: rank r runs ``ahead[r]`` forwards, then input gradients and forwards.

    Input gradients and forwards alternate. Weight gradients are deferred until ``behind[r]`` of them are waiting.
    """
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


# Ranks hold v stages each, assigned in turn. With p positions, microbatches go in rounds of k (`write_in_turn`):
#
#     interleaved    (v - 1)·k + 2(p - 1 - i) forwards ahead, then one forward, one backward (Narayanan et al., SC 2021)
#     looped-bfs     chunk after chunk, all microbatches through each                  (Lamy-Poirier, MLSys 2023)
#
# k is the number of microbatches over max(1, microbatches // p) rounds, as in torch (ScheduleInterleaved1F1B); p in
# Megatron-LM, which requires multiples of p.
@writes_orders("interleaved")
def interleaved(plan: Plan) -> RankOrders:
    """Return the orders of interleaved 1F1B, Megatron-LM's schedule for virtual pipeline stages.

    Raises PlanError for microbatches that do not divide into equal rounds.
    """
    seats = sit_in_turn(plan)
    sizes = _round_sizes(plan, seats)
    ahead = (seats.stages.shape[1] - 1) * sizes + 2 * (seats.num_positions - 1 - seats.positions)
    return write_in_turn(seats, ahead + 1, sizes)


@writes_orders("looped-bfs")
def looped_breadth_first(plan: Plan) -> RankOrders:
    """Return orders in which all microbatches pass one stage of a rank, then its next stage.

    Backwards start with the last microbatch, as in torch.
    """
    seats = sit_in_turn(plan)
    return write_in_turn(seats, seats.stages.shape[1] * seats.counts, seats.counts, last_first=True)


def _round_sizes(plan: Plan, seats: Seats) -> NDArray[np.int64]:
    """Return the microbatches of a round, by rank."""
    rounds = np.maximum(1, seats.counts // seats.num_positions)
    for rank in np.flatnonzero(seats.counts % rounds)[:1].tolist():
        count, number = int(seats.counts[rank]), int(rounds[rank])
        raise PlanError(
            f"The schedule {plan.schedule} runs the {count} microbatches of a replica in {number} equal rounds over "
            f"{seats.num_positions} positions; expected a multiple of {number}. Choose {number * (count // number)} or "
            f"{number * (count // number + 1)} microbatches for each replica."
        )
    return seats.counts // rounds


@writes_orders("gpipe")
def gpipe(plan: Plan) -> RankOrders:
    """Return the orders of GPipe: all forwards, then all backwards in the same order."""
    if plan.has_shares:
        return write_windows(plan, [[plan.num_microbatches] * len(stage.ranks) for stage in plan.stages])
    seats = sit_alone(plan)
    return write_in_turn(seats, ahead=seats.counts, round_size=seats.counts)


@writes_orders("1f1b")
def one_forward_one_backward(plan: Plan) -> RankOrders:
    """Return the orders of 1F1B: fill the pipeline, then alternate one backward and one forward, then drain."""
    if plan.has_shares:
        return write_windows(plan, find_windows(plan))
    seats = sit_alone(plan)
    return write_in_turn(seats, ahead=active_counts(plan)[seats.positions], round_size=seats.counts)


@writes_orders("zb-h1")
def zb_h1(plan: Plan) -> RankOrders:
    """Return the orders of ZB-H1: fewer bubbles than 1f1b, within the memory of 1f1b."""
    seats = sit_alone(plan, alike=True)
    return write_zero_bubble(seats, ahead=seats.num_positions - seats.positions, behind=seats.positions)


@writes_orders("zb-h2")
def zb_h2(plan: Plan) -> RankOrders:
    """Return the orders of ZB-H2: no bubble within a step, with about twice the memory of 1f1b."""
    seats = sit_alone(plan, alike=True)
    ahead = 2 * (seats.num_positions - seats.positions) - 1
    return write_zero_bubble(seats, ahead, behind=2 * seats.positions)


def write_windows(plan: Plan, windows: Sequence[Sequence[int]]) -> RankOrders:
    """Return the orders of all ranks for windows of microbatches in flight, given by stage and replica.

    A replica runs the forward of microbatch m before the backward of b if m - b is below its window. Raises PlanError
    for several stages on a rank.
    """
    check_alone(plan)
    orders: dict[int, OrderColumns] = {}
    for index, stage in enumerate(plan.stages):
        for replica, rank in enumerate(stage.ranks):
            own = np.array(stage.microbatches_of(replica, plan.num_microbatches), np.int32)
            # A backward comes before the forward that no longer belongs to its window.
            order = np.argsort(np.concatenate([own, own + (windows[index][replica] - 0.5)]), kind="stable")
            opcode = np.repeat((Opcode.FORWARD, Opcode.BACKWARD), len(own))
            orders[rank] = make_columns(opcode[order], index, np.tile(own, 2)[order])
    return join_ranks(orders[rank] for rank in range(plan.num_ranks))
