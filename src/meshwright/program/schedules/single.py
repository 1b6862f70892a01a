"""Schedules of pipelines with one stage on every rank.

    gpipe    all forwards, then all backwards in the order of the forwards         Huang et al., NeurIPS 2019
    1f1b     at most k microbatches in flight, then one forward, one backward      Narayanan et al., ICML 2021
    zb-h1    1f1b with backwards in two parts; the second parts wait until they fill what 1f1b leaves idle; memory of
             1f1b                                                                  Qi et al., ICLR 2024, section 2.2
    zb-h2    2(p - i) - 1 forwards ahead instead of p - i, gradients of weights 2i behind instead of i:
             no rank is idle between its first and last computation                section 2.3

PipeDream-Flush with replicated stages: k = ceil(R_s + R_(s+1) + … / R_s), PipeDream's number of active minibatches per
replica; no order of such ranks can wait in a circle, because k_s R_s > (k_(s+1) - 1) R_(s+1).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.program.schedules.columns import OrderColumns, gather_columns, make_columns
from meshwright.program.schedules.layouts import Seat, num_active, sit_alone
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import Plan


def gpipe(plan: Plan, rank: int) -> OrderColumns:
    """All forwards, then all backwards in the same order."""
    seat = sit_alone(plan, rank)
    count = len(seat.microbatches)
    return make_columns(
        np.repeat([Opcode.FORWARD, Opcode.BACKWARD], count), seat.stages[0], np.tile(seat.microbatches, 2)
    )


def one_forward_one_backward(plan: Plan, rank: int) -> OrderColumns:
    """Fill the pipeline, then alternate one backward and one forward, then drain."""
    seat = sit_alone(plan, rank)
    count = len(seat.microbatches)
    at_most = min(num_active(plan, seat.position), count)
    opcode = np.full(2 * count, Opcode.BACKWARD, np.int8)
    opcode[:at_most] = Opcode.FORWARD
    opcode[at_most + 1 : 2 * count - at_most : 2] = Opcode.FORWARD
    microbatch = np.empty(2 * count, np.int32)
    for kind in (Opcode.FORWARD, Opcode.BACKWARD):
        microbatch[opcode == kind] = seat.microbatches
    return make_columns(opcode, seat.stages[0], microbatch)


def zb_h1(plan: Plan, rank: int) -> OrderColumns:
    """Zero bubble within the memory of 1f1b."""
    seat = sit_alone(plan, rank, alike=True)
    return gather_columns(_zero_bubble(seat, ahead=seat.num_positions - seat.position, behind=seat.position))


def zb_h2(plan: Plan, rank: int) -> OrderColumns:
    """Zero bubble with about twice the memory of 1f1b."""
    seat = sit_alone(plan, rank, alike=True)
    ahead = 2 * (seat.num_positions - seat.position) - 1
    return gather_columns(_zero_bubble(seat, ahead, behind=2 * seat.position))


def _zero_bubble(seat: Seat, ahead: int, behind: int) -> Iterator[tuple[Opcode, int, int]]:
    """Forwards ``ahead``, then gradients of inputs and forwards in turn; gradients of weights stay ``behind``.

    The later the stage, the longer they wait: the gradients that others wait for go first.
    """
    stage, mine = seat.stages[0], seat.microbatches.tolist()
    count, forwards, weights = len(mine), min(ahead, len(mine)), 0
    for microbatch in mine[:forwards]:
        yield Opcode.FORWARD, stage, microbatch
    for done, microbatch in enumerate(mine, start=1):
        yield Opcode.BACKWARD_INPUT, stage, microbatch
        if done > behind:
            yield Opcode.BACKWARD_WEIGHT, stage, mine[weights]
            weights += 1
        if forwards < count:
            yield Opcode.FORWARD, stage, mine[forwards]
            forwards += 1
    for microbatch in mine[weights:]:
        yield Opcode.BACKWARD_WEIGHT, stage, microbatch
