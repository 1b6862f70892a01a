"""Schedules of pipelines whose ranks hold v stages each, dealt out in turn.

With p positions, microbatches go in rounds of k; step s of the forwards computes chunk (s // k) mod v of microbatch
(s // (k·v))·k + s mod k, the backwards the chunks in reverse.

    interleaved    (v - 1)·k + 2(p - 1 - i) forwards ahead, then one forward, one backward     Narayanan et al., SC 2021
    looped-bfs     chunk after chunk, all microbatches through each                            Lamy-Poirier, MLSys 2023

k is the number of microbatches over max(1, microbatches // p) rounds, as torch has it (ScheduleInterleaved1F1B); p in
Megatron-LM, which asks for multiples of p.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.program.schedules.columns import OrderColumns, make_columns
from meshwright.program.schedules.layouts import Seat, sit_in_turn
from meshwright.spec.errors import PlanError
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import Plan


def interleaved(plan: Plan, rank: int) -> OrderColumns:
    """Megatron-LM's virtual pipeline. Raises PlanError for microbatches that do not divide into equal rounds."""
    seat = sit_in_turn(plan, rank)
    size = _round_size(plan, seat)
    chunks, total = len(seat.stages), len(seat.stages) * len(seat.microbatches)
    ahead = min((chunks - 1) * size + 2 * (seat.num_positions - 1 - seat.position), total)
    opcode = np.full(2 * total, Opcode.BACKWARD, np.int8)
    opcode[:ahead] = Opcode.FORWARD
    opcode[ahead : 2 * total - ahead : 2] = Opcode.FORWARD
    steps = np.arange(total)
    chunk, microbatch = _step(steps, size, chunks)
    stages = np.array(seat.stages, np.int32)
    columns = np.empty((2, 2 * total), np.int32)
    for kind, order in ((Opcode.FORWARD, stages), (Opcode.BACKWARD, stages[::-1])):
        columns[:, opcode == kind] = order[chunk], seat.microbatches[microbatch]
    return make_columns(opcode, columns[0], columns[1])


def looped_breadth_first(plan: Plan, rank: int) -> OrderColumns:
    """All microbatches through one chunk after the other; on the way back the last one first, as torch has it."""
    seat = sit_in_turn(plan, rank)
    count, stages = len(seat.microbatches), np.array(seat.stages, np.int32)
    total = count * len(stages)
    return make_columns(
        np.repeat([Opcode.FORWARD, Opcode.BACKWARD], total),
        np.concatenate([np.repeat(stages, count), np.repeat(stages[::-1], count)]),
        np.concatenate([np.tile(seat.microbatches, len(stages)), np.tile(seat.microbatches[::-1], len(stages))]),
    )


def _step(steps: NDArray[np.int64], size: int, chunks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunk and microbatch of each step."""
    return steps // size % chunks, steps // (size * chunks) * size + steps % size


def _round_size(plan: Plan, seat: Seat) -> int:
    count = len(seat.microbatches)
    rounds = max(1, count // seat.num_positions)
    if count % rounds:
        raise PlanError(
            f"The schedule {plan.schedule} takes {count} microbatches of a replica in {rounds} equal rounds over "
            f"{seat.num_positions} positions; expected a multiple of {rounds}. Choose {rounds * (count // rounds)} or "
            f"{rounds * (count // rounds + 1)} microbatches for each replica."
        )
    return count // rounds
