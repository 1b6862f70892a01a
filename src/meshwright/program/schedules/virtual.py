"""Schedules of pipelines whose ranks hold v stages each, assigned in turn.

With p positions, microbatches go in rounds of k; step s of the forwards computes chunk (s // k) mod v of microbatch
(s // (k·v))·k + s mod k, the backwards the chunks in reverse.

    interleaved    (v - 1)·k + 2(p - 1 - i) forwards ahead, then one forward, one backward     Narayanan et al., SC 2021
    looped-bfs     chunk after chunk, all microbatches through each                            Lamy-Poirier, MLSys 2023

k is the number of microbatches over max(1, microbatches // p) rounds, as in torch (ScheduleInterleaved1F1B); p in
Megatron-LM, which requires multiples of p.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.program.schedules.columns import RankOrders
from meshwright.program.schedules.layouts import Seats, sit_in_turn
from meshwright.program.schedules.writers import write_in_turn
from meshwright.spec.errors import PlanError
from meshwright.spec.plan import Plan


def interleaved(plan: Plan) -> RankOrders:
    """Return Megatron-LM's virtual pipeline. Raises PlanError for microbatches that do not divide into equal rounds."""
    seats = sit_in_turn(plan)
    sizes = _round_sizes(plan, seats)
    ahead = (seats.stages.shape[1] - 1) * sizes + 2 * (seats.num_positions - 1 - seats.positions)
    return write_in_turn(seats, ahead + 1, sizes)


def looped_breadth_first(plan: Plan) -> RankOrders:
    """Return all microbatches through one chunk after the other; backwards start with the last one, as in torch."""
    seats = sit_in_turn(plan)
    return write_in_turn(seats, seats.stages.shape[1] * seats.counts, seats.counts, last_first=True)


def _round_sizes(plan: Plan, seats: Seats) -> NDArray[np.int64]:
    """Return the microbatches of a round, by rank."""
    rounds = np.maximum(1, seats.counts // seats.num_positions)
    for rank in np.flatnonzero(seats.counts % rounds)[:1].tolist():
        count, number = int(seats.counts[rank]), int(rounds[rank])
        raise PlanError(
            f"The schedule {plan.schedule} takes {count} microbatches of a replica in {number} equal rounds over "
            f"{seats.num_positions} positions; expected a multiple of {number}. Choose {number * (count // number)} or "
            f"{number * (count // number + 1)} microbatches for each replica."
        )
    return seats.counts // rounds
