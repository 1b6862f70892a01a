"""A greedy list scheduler: whenever a rank is free, a rule chooses what it computes next.

In the manner of Qi et al. (Zero Bubble, ICLR 2024, section 3.1): forwards ahead as memory allows, backwards as soon as
they can, weights in the gaps. All ranks share one clock, so a rank knows which values will arrive when.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.program.order_loops import (
    BACKWARD,
    FEEDS,
    FORWARD,
    INPUT,
    NEEDS,
    WEIGHT,
    Columns,
    Ints,
    OrderProblem,
    duration,
    seat_of,
)

_NEVER = 2**62


class GreedyRule(NamedTuple):
    """How `write_greedily` chooses.

    ``split``: backwards in two parts. ``forward_first``: a forward goes before a backward that could run. ``patience``:
    do not start a forward if a backward comes within this multiple of its time. ``fill``: a part for weights runs in a
    gap of at least this fraction of its time. ``owed``: the most parts for weights that may wait (-1: any number).
    ``deepest_first``: among several stages take the latest, instead of the earliest microbatch.
    """

    split: bool
    forward_first: bool
    patience: float
    fill: float
    owed: int
    deepest_first: bool


class _State(NamedTuple):
    """Arrivals of values, progress of each seat (a stage on a rank), and bytes held by each rank.

    ``arrivals`` and ``missing`` have shape (forward or backward, stage, microbatch): when the last of the known values
    arrives, less `_NEVER` while some values are missing, and their number.
    """

    arrivals: Ints
    missing: Ints
    forwards: Ints
    inputs: Ints
    weights: Ints
    held: Ints


@compiled
def write_greedily(problem: OrderProblem, cap: Ints, rule: GreedyRule, columns: Columns) -> int:
    """Write an order in which no rank holds more than ``cap`` bytes; return its length in ps, -1 if it gets stuck.

    The clock advances from decision to decision; a rank with nothing to do sleeps until something arrives.
    """
    num_ranks, num_seats, num_stages = len(cap), len(problem.seat_stage), len(problem.kept)
    state = _State(
        np.full((2, num_stages, problem.num_microbatches), -_NEVER, np.int64),
        np.empty((2, num_stages, problem.num_microbatches), np.int64),
        np.zeros(num_seats, np.int64),
        np.zeros(num_seats, np.int64),
        np.zeros(num_seats, np.int64),
        np.zeros(num_ranks, np.int64),
    )
    for end in range(2 * num_stages):
        kind, stage = divmod(end, num_stages)
        state.missing[kind, stage] = problem.link_offsets[NEEDS, end + 1] - problem.link_offsets[NEEDS, end]
        if kind == 0 and state.missing[0, stage, 0] == 0:
            state.arrivals[0, stage] = 0
    wake, asleep = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.bool_)
    place, length = columns.offsets[:-1].copy(), 0
    while True:
        rank = int(np.argmin(wake))
        now = int(wake[rank])
        if now >= _NEVER:
            break
        opcode, seat, later = _choose(problem, rule, cap, state, rank, now)
        asleep[rank] = opcode < 0
        if opcode < 0:
            wake[rank] = later
            continue
        done = state.forwards if opcode == FORWARD else state.weights if opcode == WEIGHT else state.inputs
        stage, microbatch = problem.seat_stage[seat], _microbatch(problem, seat, done[seat])
        done[seat] += 1
        i = place[rank]
        columns.opcode[i], columns.stage[i], columns.microbatch[i] = opcode, stage, microbatch
        place[rank] += 1
        end = now + duration(problem, opcode, seat)
        wake[rank], length = end, max(length, end)
        if opcode == FORWARD:
            state.held[rank] += problem.kept[stage]
        elif opcode != INPUT:
            state.held[rank] -= problem.kept[stage]
        if opcode != WEIGHT:
            _hand_on(problem, state, 0 if opcode == FORWARD else 1, stage, microbatch, rank, now, end, wake, asleep)
    return int(length) if place.sum() == columns.offsets[1:].sum() else -1


@compiled
def _microbatch(problem: OrderProblem, seat: int, number: int) -> int:
    return int(problem.seat_first[seat] + number * problem.seat_step[seat])


@compiled
def _hand_on(
    problem: OrderProblem,
    state: _State,
    kind: int,
    stage: int,
    microbatch: int,
    rank: int,
    now: int,
    end: int,
    wake: Ints,
    asleep: NDArray[np.bool_],
) -> None:
    """Record the arrival of a computed value at its targets, and wake ranks that can then continue."""
    own = kind * len(problem.kept) + stage
    first, stop = problem.link_offsets[FEEDS, own], problem.link_offsets[FEEDS, own + 1]
    if kind == 0 and first == stop:
        state.arrivals[1, stage, microbatch] = end
    for k in range(first, stop):
        target = problem.link_stage[FEEDS, k]
        other = problem.seat_rank[seat_of(problem, target, microbatch)]
        ready = end if other == rank else end + problem.link_ps[FEEDS, k]
        latest = max(state.arrivals[kind, target, microbatch], ready - _NEVER)
        state.missing[kind, target, microbatch] -= 1
        if state.missing[kind, target, microbatch] == 0:
            latest += _NEVER
            if asleep[other]:
                wake[other] = max(now, min(wake[other], latest))
        state.arrivals[kind, target, microbatch] = latest


@compiled
def _choose(
    problem: OrderProblem, rule: GreedyRule, cap: Ints, state: _State, rank: int, now: int
) -> tuple[int, int, int]:
    """Return opcode and seat of what a rank does next; or -1, -1 and the time of the next arrival."""
    backward, next_backward = _find_backward(problem, rule, state, rank, now)
    forward, next_forward, blocked = _find_forward(problem, rule, cap, state, rank, now)
    weight, owed = _find_weight(problem, rule, state, rank)
    if weight >= 0 and 0 <= rule.owed < owed:
        return WEIGHT, weight, now
    if backward >= 0 and not (rule.forward_first and forward >= 0):
        return (INPUT if rule.split else BACKWARD), backward, now
    if forward >= 0 and next_backward >= now + rule.patience * problem.forward[forward]:
        return FORWARD, forward, now
    nearest = next_backward if forward >= 0 else min(next_forward, next_backward)
    if weight >= 0 and (blocked or nearest - now >= rule.fill * problem.weights[weight]):
        return WEIGHT, weight, now
    return -1, -1, int(nearest)


@compiled
def _find_backward(problem: OrderProblem, rule: GreedyRule, state: _State, rank: int, now: int) -> tuple[int, int]:
    """Return the seat whose backward can run now, or -1; and when the next one can, as far as that is known."""
    found, least, later = -1, _NEVER, _NEVER
    for seat in range(problem.seat_offsets[rank], problem.seat_offsets[rank + 1]):
        if state.inputs[seat] == state.forwards[seat]:
            continue
        m = _microbatch(problem, seat, state.inputs[seat])
        ready = state.arrivals[1, problem.seat_stage[seat], m]
        if ready > now:
            later = min(later, ready)
        elif ready >= 0 and (m < least or rule.deepest_first):
            found, least = seat, m
    return found, int(later)


@compiled
def _find_forward(
    problem: OrderProblem, rule: GreedyRule, cap: Ints, state: _State, rank: int, now: int
) -> tuple[int, int, bool]:
    """The same for forwards; also return whether one could run now with more memory."""
    found, least, later, blocked = -1, _NEVER, _NEVER, False
    for seat in range(problem.seat_offsets[rank], problem.seat_offsets[rank + 1]):
        if state.forwards[seat] == problem.seat_count[seat]:
            continue
        m = _microbatch(problem, seat, state.forwards[seat])
        ready = state.arrivals[0, problem.seat_stage[seat], m]
        if ready < 0:
            continue
        if state.held[rank] + problem.kept[problem.seat_stage[seat]] > cap[rank]:
            blocked = blocked or ready <= now
        elif ready > now:
            later = min(later, ready)
        elif m < least or rule.deepest_first:
            found, least = seat, m
    return found, int(later), blocked


@compiled
def _find_weight(problem: OrderProblem, rule: GreedyRule, state: _State, rank: int) -> tuple[int, int]:
    """Return the seat with a waiting part for weights, that of the earliest microbatch, or -1; and how many wait."""
    found, least, owed = -1, _NEVER, 0
    if rule.split:
        for seat in range(problem.seat_offsets[rank], problem.seat_offsets[rank + 1]):
            waiting = state.inputs[seat] - state.weights[seat]
            m = _microbatch(problem, seat, state.weights[seat])
            if waiting > 0 and m < least:
                found, least = seat, m
            owed += waiting
    return found, int(owed)
