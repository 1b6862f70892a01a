"""Play orders with given times in a compiled loop: when each computation starts, and whether memory suffices.

A *seat* is a stage on one of its ranks; its microbatches are first, first + step, ... . The computations of all ranks
are concatenated as columns (opcode, stage, microbatch), rank r at ``offsets[r]:offsets[r + 1]``. A forward needs the
forwards of all stages that feed its own, a backward (or its part for inputs) the backwards of all that its own feeds,
each plus the time of the transfer between two ranks; a forward holds ``kept`` bytes until the part for weights (or the
whole backward) ends. Stages are numbered so that each feeds later ones only; in a chain each feeds the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.spec.instructions import Opcode

Ints = NDArray[np.int64]

FORWARD, BACKWARD, INPUT, WEIGHT = (
    int(opcode) for opcode in (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
)


# Rows of a problem's links.
NEEDS, FEEDS = 0, 1


class OrderProblem(NamedTuple):
    """Seats rank by rank (rank r has ``seat_offsets[r]:seat_offsets[r + 1]``), times in ps, bytes.

    ``replica_offsets`` and ``replica_seats``: the seats of each stage, microbatch m on the (m mod R)-th.

    The *ends* of stage s of S are s (forwards) and S + s (backwards). Links of end e are
    ``link_offsets[:, e]:link_offsets[:, e + 1]``: they connect it with the same end of the stages ``link_stage``
    and take ``link_ps`` between two ranks; row `NEEDS` has the ends that it needs, row `FEEDS` those that need it.
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
    link_offsets: Ints
    link_stage: Ints
    link_ps: Ints
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
def seat_of(problem: OrderProblem, stage: int, microbatch: int) -> int:
    """Return the seat that computes a microbatch of a stage."""
    first = problem.replica_offsets[stage]
    if problem.replica_offsets[stage + 1] - first == 1:  # a division would double the time of this function
        return int(problem.replica_seats[first])
    return int(problem.replica_seats[first + microbatch % (problem.replica_offsets[stage + 1] - first)])


@compiled
def duration(problem: OrderProblem, opcode: int, seat: int) -> int:
    """Return the picoseconds of a computation."""
    if opcode == FORWARD:
        return int(problem.forward[seat])
    if opcode == INPUT:
        return int(problem.inputs[seat])
    if opcode == WEIGHT:
        return int(problem.weights[seat])
    return int(problem.inputs[seat] + problem.weights[seat])


@compiled
def _arrival(problem: OrderProblem, done: Ints, kind: int, stage: int, microbatch: int, rank: int) -> int:
    """Return when everything that a forward (kind 0) or backward (1) needs is on its rank; -1 if not known yet.

    ``done`` (kind, stage, microbatch): when each ends, -1 if not known yet.
    """
    end, latest = kind * len(problem.kept) + stage, 0
    for k in range(problem.link_offsets[NEEDS, end], problem.link_offsets[NEEDS, end + 1]):
        other = problem.link_stage[NEEDS, k]
        there = done[kind, other, microbatch]
        if there < 0:
            return -1
        if problem.seat_rank[seat_of(problem, other, microbatch)] != rank:
            there += problem.link_ps[NEEDS, k]
        latest = max(latest, there)
    return int(latest)


@compiled
def play(problem: OrderProblem, columns: Columns, start: Ints) -> int:
    """Fill in when each computation starts; return when the last one ends, -1 if the ranks wait in a cycle."""
    num_ranks = len(columns.offsets) - 1
    done = np.full((2, len(problem.kept), problem.num_microbatches), -1, np.int64)
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
                    if columns.opcode[i] == WEIGHT:
                        continue
                    kind = 0 if columns.opcode[i] == FORWARD else 1
                    ready = _arrival(problem, done, kind, columns.stage[i], columns.microbatch[i], rank)
                    if ready < 0:
                        begin = -1
                        break
                    begin = max(begin, ready)
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
def fits(problem: OrderProblem, columns: Columns) -> bool:
    """Whether every rank stays within its memory limit all the time."""
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
