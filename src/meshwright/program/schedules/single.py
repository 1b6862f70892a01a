"""Schedules of pipelines with one stage on every rank.

    gpipe    all forwards, then all backwards in the order of the forwards         Huang et al., NeurIPS 2019
    1f1b     at most k microbatches in flight, then one forward, one backward      Narayanan et al., ICML 2021
    zb-h1    1f1b with backwards in two parts; the second parts wait until they fill what 1f1b leaves idle; memory of
             1f1b                                                                  Qi et al., ICLR 2024, section 2.2
    zb-h2    2(p - i) - 1 forwards ahead instead of p - i, gradients of weights 2i behind instead of i:
             no rank is idle between its first and last computation                section 2.3

PipeDream-Flush with replicated stages: k = ceil((R_s + R_(s+1) + …) / R_s), PipeDream's number of active minibatches
per replica; no order of such ranks can deadlock, because k_s R_s > (k_(s+1) - 1) R_(s+1).

Where replicas have shares of the microbatches, GPipe and 1F1B have windows in place of counts. With equal replicas 1F1B
keeps k microbatches of a replica in flight. Where replica r of stage s computes m_r of M microbatches, one is due
every M / m_r microbatches, and it runs

    forward of m before backward of b  if  m - b < w_r = floor(M / m_r) + q        q = Σ stages behind max ceil(M / m_r)

that is, while b is on its way through the later stages and back, and none of their replicas is waited for. With equal
shares this is PipeDream's number of active minibatches. No order of such ranks can deadlock: let forwards of
microbatch m happen at m, backwards at m + w_r; then every w_r of a stage is above q, and no w_r of the next one is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.program.schedules.columns import OrderColumns, RankOrders, join_ranks, make_columns
from meshwright.program.schedules.layouts import active_counts, check_alone, find_windows, sit_alone
from meshwright.program.schedules.writers import write_in_turn, write_zero_bubble
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import Plan


def gpipe(plan: Plan) -> RankOrders:
    """Return GPipe: all forwards, then all backwards in the same order."""
    if plan.has_shares:
        return write_windows(plan, [[plan.num_microbatches] * len(stage.ranks) for stage in plan.stages])
    seats = sit_alone(plan)
    return write_in_turn(seats, ahead=seats.counts, round_size=seats.counts)


def one_forward_one_backward(plan: Plan) -> RankOrders:
    """Return 1F1B: fill the pipeline, then alternate one backward and one forward, then drain."""
    if plan.has_shares:
        return write_windows(plan, find_windows(plan))
    seats = sit_alone(plan)
    return write_in_turn(seats, ahead=active_counts(plan)[seats.positions], round_size=seats.counts)


def zb_h1(plan: Plan) -> RankOrders:
    """Return ZB-H1: zero bubble within the memory of 1f1b."""
    seats = sit_alone(plan, alike=True)
    return write_zero_bubble(seats, ahead=seats.num_positions - seats.positions, behind=seats.positions)


def zb_h2(plan: Plan) -> RankOrders:
    """Return ZB-H2: zero bubble with about twice the memory of 1f1b."""
    seats = sit_alone(plan, alike=True)
    ahead = 2 * (seats.num_positions - seats.positions) - 1
    return write_zero_bubble(seats, ahead, behind=2 * seats.positions)


def write_windows(plan: Plan, windows: Sequence[Sequence[int]]) -> RankOrders:
    """Return the orders of all ranks from windows per replica. Raises PlanError for several stages on a rank."""
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
