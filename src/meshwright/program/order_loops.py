"""Orders played with given times in a compiled loop: when does each computation start, and does memory suffice?

A *seat* is a stage on one of its ranks; its microbatches are first, first + step, ... . Computations of all ranks stand
behind each other as columns (opcode, stage, microbatch), rank r at ``offsets[r]:offsets[r + 1]``. A forward needs the
forward of the stage before, a backward (or its part for inputs) the backward of the stage behind, each plus the time
of the transfer between two ranks; a forward holds ``kept`` bytes until the part for weights (or the whole) ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compiled import compiled
from meshwright.spec.instructions import Opcode

Ints = NDArray[np.int64]

FORWARD, BACKWARD, INPUT, WEIGHT = (
    int(opcode) for opcode in (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
)


class Problem(NamedTuple):
    """Seats rank by rank (rank r has ``seat_offsets[r]:seat_offsets[r + 1]``), times in ps, bytes.

    ``replica_offsets`` and ``replica_seats``: the seats of each stage, microbatch m on the (m mod R)-th. ``sending``
    and ``returning``, of shape (stages,), from a stage to the next and to the one before, between two ranks.
    """

    seat_offsets: Ints
    seat_stage: Ints
    seat_rank: Ints
    seat_first: Ints
    seat_step: Ints
    seat_count: Ints
    replica_offsets: Ints
    replica_seats: Ints
    forward: Ints
    inputs: Ints
    weights: Ints
    sending: Ints
    returning: Ints
    kept: Ints
    limit: Ints
    num_microbatches: int


class Columns(NamedTuple):
    """Computations of all ranks; ``joint`` as in `schedules.OrderColumns`."""

    offsets: Ints
    opcode: Ints
    stage: Ints
    microbatch: Ints
    joint: Ints


@compiled
def seat_of(problem: Problem, stage: int, microbatch: int) -> int:
    """The seat that computes a microbatch of a stage."""
    first = problem.replica_offsets[stage]
    if problem.replica_offsets[stage + 1] - first == 1:  # a division takes as long as all the rest
        return int(problem.replica_seats[first])
    return int(problem.replica_seats[first + microbatch % (problem.replica_offsets[stage + 1] - first)])


@compiled
def duration(problem: Problem, opcode: int, seat: int) -> int:
    """Picoseconds of a computation."""
    if opcode == FORWARD:
        return int(problem.forward[seat])
    if opcode == INPUT:
        return int(problem.inputs[seat])
    if opcode == WEIGHT:
        return int(problem.weights[seat])
    return int(problem.inputs[seat] + problem.weights[seat])


@compiled
def _arrival(problem: Problem, columns: Columns, done: Ints, i: int, rank: int) -> int:
    """When what a computation needs is there; -1 if that is not known yet."""
    opcode, stage, microbatch = columns.opcode[i], columns.stage[i], columns.microbatch[i]
    num_stages = len(problem.sending)
    if opcode == WEIGHT or (opcode == FORWARD and stage == 0) or (opcode != FORWARD and stage == num_stages - 1):
        return 0
    other = stage - 1 if opcode == FORWARD else stage + 1
    end = done[0 if opcode == FORWARD else 1, other, microbatch]
    if end < 0 or problem.seat_rank[seat_of(problem, other, microbatch)] == rank:
        return int(end)
    return int(end + (problem.sending[other] if opcode == FORWARD else problem.returning[other]))


@compiled
def play(problem: Problem, columns: Columns, start: Ints) -> int:
    """Fill in when each computation starts; returns when the last one ends, -1 if the ranks wait in a circle."""
    num_ranks = len(columns.offsets) - 1
    done = np.full((2, len(problem.sending), problem.num_microbatches), -1, np.int64)
    place, free = columns.offsets[:-1].copy(), np.zeros(num_ranks, np.int64)
    moved, left = True, len(columns.opcode)
    while moved:
        moved = False
        for rank in range(num_ranks):
            while place[rank] < columns.offsets[rank + 1]:
                last = place[rank]
                while columns.joint[last]:
                    last += 1
                begin = free[rank]
                for i in range(place[rank], last + 1):
                    arrival = _arrival(problem, columns, done, i, rank)
                    if arrival < 0:
                        begin = -1
                        break
                    begin = max(begin, arrival)
                if begin < 0:
                    break
                for i in range(place[rank], last + 1):
                    start[i] = begin
                    begin += duration(
                        problem, columns.opcode[i], seat_of(problem, columns.stage[i], columns.microbatch[i])
                    )
                for i in range(place[rank], last + 1):
                    if columns.opcode[i] != WEIGHT:
                        kind = 0 if columns.opcode[i] == FORWARD else 1
                        done[kind, columns.stage[i], columns.microbatch[i]] = begin
                free[rank] = begin
                left -= last + 1 - place[rank]
                place[rank] = last + 1
                moved = True
    return int(free.max()) if left == 0 else -1


@compiled
def fits(problem: Problem, columns: Columns) -> bool:
    """Whether every rank holds at most its limit all the time."""
    for rank in range(len(columns.offsets) - 1):
        held = 0
        for i in range(columns.offsets[rank], columns.offsets[rank + 1]):
            if columns.opcode[i] == FORWARD:
                held += problem.kept[columns.stage[i]]
                if held > problem.limit[rank]:
                    return False
            elif columns.opcode[i] != INPUT:
                held -= problem.kept[columns.stage[i]]
    return True
