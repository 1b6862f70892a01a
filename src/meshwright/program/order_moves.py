"""Improve an order: move computations on the critical path to earlier places on their rank."""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.program.order_loops import (
    FORWARD,
    INPUT,
    NEEDS,
    WEIGHT,
    Columns,
    Ints,
    OrderProblem,
    duration,
    play,
    seat_of,
)

# Distances by which a computation is moved at once; small ones are drawn more often.
_SHIFTS = (1, 1, 2, 3, 5, 8)


@compiled
def improve(problem: OrderProblem, columns: Columns, rounds: int, enough: int, seed: int) -> int:
    """Move computations on the critical path to earlier places, as long as nothing gets slower; return the length, ps.

    ``columns`` is set to the shortest order found; an order of length ``enough`` ends the search. A computation never
    passes one that it needs on its own rank, nor one of its own kind and stage, and memory limits hold.
    """
    start, tried = np.empty(len(columns.opcode), np.int64), np.empty(len(columns.opcode), np.int64)
    now = best = play(problem, columns, start)
    kept = (columns.opcode.copy(), columns.stage.copy(), columns.microbatch.copy())
    critical = _critical(problem, columns, start, now)
    state = np.uint64(seed * 2 + 1)
    for _ in range(rounds):
        if best <= enough or len(critical) == 0:
            break
        # Knuth's linear congruential generator (MMIX): the same numbers everywhere.
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        draw = int(state >> np.uint64(33))
        rank, i = critical[draw % len(critical)]
        begin = max(i - _SHIFTS[draw // 4096 % len(_SHIFTS)], columns.offsets[rank])
        if not _may_move(problem, columns, rank, begin, i):
            continue
        _rotate(columns, begin, i)
        length = play(problem, columns, tried)
        if length < 0 or length > now:
            _rotate_back(columns, begin, i)
            continue
        now = length
        start[:] = tried
        critical = _critical(problem, columns, start, now)
        if now < best:
            best = now
            kept[0][:], kept[1][:], kept[2][:] = columns.opcode, columns.stage, columns.microbatch
    columns.opcode[:], columns.stage[:], columns.microbatch[:] = kept[0], kept[1], kept[2]
    return int(best)


@compiled
def _critical(problem: OrderProblem, columns: Columns, start: Ints, length: int) -> list[tuple[int, int]]:
    """Return (rank, index) of computations on one critical path that wait for the one before them on their rank."""
    found = [(0, 0) for _ in range(0)]
    where = np.full((3, len(problem.kept), problem.num_microbatches), -1, np.int64)
    ranks = np.empty(len(start), np.int64)
    i = -1
    for rank in range(len(columns.offsets) - 1):
        for k in range(columns.offsets[rank], columns.offsets[rank + 1]):
            ranks[k] = rank
            kind = 0 if columns.opcode[k] == FORWARD else 2 if columns.opcode[k] == WEIGHT else 1
            where[kind, columns.stage[k], columns.microbatch[k]] = k
            if start[k] + _length(problem, columns, k) == length:
                i = k
    while i >= 0 and start[i] > 0:
        rank = ranks[i]
        if i > columns.offsets[rank] and start[i - 1] + _length(problem, columns, i - 1) == start[i]:
            found.append((rank, i))
            i -= 1
            continue
        kind, begin, microbatch = 0 if columns.opcode[i] == FORWARD else 1, start[i], columns.microbatch[i]
        end = kind * len(problem.kept) + columns.stage[i]
        for k in range(problem.link_offsets[NEEDS, end], problem.link_offsets[NEEDS, end + 1]):
            i = where[kind, problem.link_stage[NEEDS, k], microbatch]
            away = problem.link_ps[NEEDS, k] if ranks[i] != rank else 0
            if start[i] + _length(problem, columns, i) + away == begin:
                break
    return found


@compiled
def _length(problem: OrderProblem, columns: Columns, i: int) -> int:
    return duration(problem, columns.opcode[i], seat_of(problem, columns.stage[i], columns.microbatch[i]))


@compiled
def _may_move(problem: OrderProblem, columns: Columns, rank: int, begin: int, i: int) -> bool:
    """Whether the computation at ``i`` may move to ``begin``, on its own rank."""
    if begin >= i:
        return False
    opcode, stage, microbatch = columns.opcode[i], columns.stage[i], columns.microbatch[i]
    for k in range(begin, i):
        if columns.stage[k] == stage and (columns.opcode[k] == opcode or columns.microbatch[k] == microbatch):
            return False
    if opcode != FORWARD:
        return True
    held = 0
    for k in range(columns.offsets[rank], i):
        if k == begin:
            held += problem.kept[stage]
        if k >= begin and held > problem.limit[rank]:
            return False
        if columns.opcode[k] == FORWARD:
            held += problem.kept[columns.stage[k]]
        elif columns.opcode[k] != INPUT:
            held -= problem.kept[columns.stage[k]]
    return bool(held <= problem.limit[rank])


@compiled
def _rotate(columns: Columns, begin: int, i: int) -> None:
    """Move the entry at ``i`` to ``begin``; those in between shift by one."""
    for column in (columns.opcode, columns.stage, columns.microbatch):
        moved = column[i]
        for k in range(i, begin, -1):
            column[k] = column[k - 1]
        column[begin] = moved


@compiled
def _rotate_back(columns: Columns, begin: int, i: int) -> None:
    for column in (columns.opcode, columns.stage, columns.microbatch):
        moved = column[begin]
        for k in range(begin, i):
            column[k] = column[k + 1]
        column[i] = moved
