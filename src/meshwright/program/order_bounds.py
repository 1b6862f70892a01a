"""Orders for given stage times and memory limits: their length (`play`), local search (`improve`), bounds (`Bounds`).

F, I and W are the times of a forward, of a backward's part for inputs, and of its part for weights; K are the bytes
that a stage holds per microbatch. A rank starts after the head H: the time at which the first microbatch can reach one
of its stages. For every rank, no order is shorter than

    H + Σ (F + I + W)                             the rank computes all of this
    H + Σ (F + I) + the way back                  its last gradient has to travel to the first stage of the model
    H + Σ K τ / limit                             a byte of a microbatch is held for a round trip τ

Heads, ways back and round trips are the longest paths between the ends of stages, with the fastest replica of each
stage, and without transfer time where two stages have a rank in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.program.schedules import OrderColumns
from meshwright.spec import Backward, BackwardInput, BackwardWeight, Forward, Opcode, Plan
from meshwright.spec.instructions import Computation
from meshwright.spec.own_code import order_file, split_reference

KINDS: dict[int, type[Computation]] = {
    Opcode.FORWARD: Forward,
    Opcode.BACKWARD: Backward,
    Opcode.BACKWARD_INPUT: BackwardInput,
    Opcode.BACKWARD_WEIGHT: BackwardWeight,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The computations of one rank, in order, and the position of each computation in the user's own file.

    ``lines`` are line numbers in that file, from 1, or 0 if not known; empty for named schedules. ``places``: for a
    file of orders, the number of each action in its line, from 1; otherwise empty.
    """

    rank: int
    columns: OrderColumns
    lines: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.columns)

    def item(self, place: int) -> Computation:
        """Return the computation at index ``place`` as a typed instruction."""
        columns = self.columns
        kind = KINDS[int(columns.opcode[place])]
        return kind(stage=int(columns.stage[place]), microbatch=int(columns.microbatch[place]))

    @property
    def items(self) -> tuple[Computation, ...]:
        """All computations as typed instructions."""
        return tuple(self.item(place) for place in range(len(self)))

    def where(self, plan: Plan, place: int) -> str:
        """Return where the user's file has computation ``place``, as `` (FILE:LINE)``; "" for named schedules."""
        if not self.lines or not self.lines[place]:
            return ""
        parts = split_reference(plan.schedule)
        path = parts[0] if parts else order_file(plan.schedule)
        action = f", action {self.places[place]}" if self.places else ""
        return f" ({path}:{self.lines[place]}{action})"


Ints = NDArray[np.int64]

FORWARD, BACKWARD, INPUT, WEIGHT = (
    int(opcode) for opcode in (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
)


# Rows of a problem's links.
NEEDS, FEEDS = 0, 1


# A *seat* is a stage on one of its ranks; its microbatches are first, first + step and so on. The computations of all
# ranks are concatenated as columns (opcode, stage, microbatch), rank r at ``offsets[r]:offsets[r + 1]``. A forward
# needs the forwards of all stages that feed its own, a backward (or its part for inputs) the backwards of all that its
# own feeds, each plus the time of the transfer between two ranks; a forward holds ``kept`` bytes until the part for
# weights (or the whole backward) ends. Stages are numbered so that each feeds later ones only; in a chain each feeds
# the next.
class OrderProblem(NamedTuple):
    """A pipeline whose order is searched: seats (a stage on one of its ranks), times in ps, and memory in bytes.

    Rank r has the seats ``seat_offsets[r]:seat_offsets[r + 1]``; seat i computes ``seat_count[i]`` microbatches, from
    ``seat_first[i]`` in steps of ``seat_step[i]``. ``forward``, ``inputs`` and ``weights`` are times per seat.
    ``replica_offsets`` and ``replica_seats`` list the R seats of each stage; the (m mod R)-th computes microbatch m.
    ``kept`` are the bytes per microbatch of each stage, ``limit`` the bytes that each rank may hold.

    The *ends* of stage s of S are s (its forwards) and S + s (its backwards). Links of end e are
    ``link_offsets[:, e]:link_offsets[:, e + 1]``: they connect the end with the same end of the stages ``link_stage``
    and take ``link_ps`` between two ranks. Row `NEEDS` has the ends that must come before, row `FEEDS` those after.
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
    """Computations of all ranks, concatenated: rank r has ``offsets[r]:offsets[r + 1]`` of the other columns.

    ``joint`` has the meaning that it has in `schedules.OrderColumns`.
    """

    offsets: Ints
    opcode: Ints
    stage: Ints
    microbatch: Ints
    joint: Ints


@compiled
def seat_of(problem: OrderProblem, stage: int, microbatch: int) -> int:
    """Return the index of the seat (a stage on one of its ranks) that computes a microbatch of a stage."""
    first = problem.replica_offsets[stage]
    if problem.replica_offsets[stage + 1] - first == 1:  # a division would double the time of this function
        return int(problem.replica_seats[first])
    return int(problem.replica_seats[first + microbatch % (problem.replica_offsets[stage + 1] - first)])


@compiled
def duration(problem: OrderProblem, opcode: int, seat: int) -> int:
    """Return how many picoseconds a computation of kind ``opcode`` takes on a seat."""
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
    """Write the start time of each computation (ps) into ``start``; return the end time of the last one.

    Returns -1 if the ranks wait for each other in a cycle.
    """
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
    """Return whether every rank stays within its memory limit (``problem.limit``) throughout the order."""
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


# Distances by which a computation is moved at once; small ones are drawn more often.
_SHIFTS = (1, 1, 2, 3, 5, 8)


@compiled
def improve(problem: OrderProblem, columns: Columns, rounds: int, enough: int, seed: int) -> int:
    """Shorten an order by local search; write the shortest order found into ``columns`` and return its length (ps).

    Each of up to ``rounds`` moves brings a computation of the critical path forward; moves that make the order longer
    are undone. The search ends early at length ``enough``. A computation never overtakes one that it needs on its own
    rank, nor one of its own kind and stage, and memory limits hold. ``seed`` determines the moves.
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


# Less than any sum of times: there is no path.
_NO_WAY = -(2**62)


class Bounds:
    """Lower bounds, in picoseconds, that hold for every order of a problem."""

    def __init__(self, problem: OrderProblem) -> None:
        self._problem, self._num_stages = problem, len(problem.kept)
        self._forward, self._inputs, self._weights = (
            np.minimum.reduceat(seconds[problem.replica_seats], problem.replica_offsets[:-1])
            for seconds in (problem.forward, problem.inputs, problem.weights)
        )

    @cached_property
    def length(self) -> int:
        """The lower bound of an order's length, in ps: the largest of the module's three bounds over all ranks."""
        problem = self._problem
        longest = 0
        for rank, (first, stop) in enumerate(pairwise(problem.seat_offsets)):
            seats = np.arange(first, stop)
            stages, count = problem.seat_stage[seats], problem.seat_count[seats]
            head = int(self._heads[stages].min())
            moving = int((count * (problem.forward + problem.inputs)[seats]).sum())
            work = moving + int((count * problem.weights[seats]).sum())
            trips = self.round_trips[stages]
            held = sum(int(n) * int(k) * int(t) for n, k, t in zip(count, problem.kept[stages], trips, strict=True))
            limit = int(problem.limit[rank])
            if len(seats) == 1 and (kept := int(problem.kept[stages[0]])):
                limit -= limit % kept
            back = int(self._ways_back[stages].min())
            longest = max(longest, head + work, head + moving + back, head + -(-held // max(limit, 1)))
        return longest

    @cached_property
    def round_trips(self) -> Ints:
        """Least time (ps) from the start of a stage's forward to the end of its backward, shape (stages,)."""
        return np.ascontiguousarray(np.diagonal(self._ways[self._num_stages :])) + self._weights

    @cached_property
    def _heads(self) -> Ints:
        """Earliest time at which a microbatch can reach each stage."""
        ends: Ints = self._ways[: self._num_stages].max(axis=1)
        return ends - self._forward

    @cached_property
    def _ways(self) -> Ints:
        """The longest path from the start of each stage's forward through each end, shape (ends, stages)."""
        num_stages, needs = self._num_stages, self._needs
        ways = np.full((2 * num_stages, num_stages), _NO_WAY, np.int64)
        for end in range(num_stages):
            for other, away in needs[end]:
                np.maximum(ways[end], ways[other] + away, out=ways[end])
            ways[end, end] = max(ways[end, end], 0)
            ways[end] += self._forward[end]
        for end in reversed(range(num_stages, 2 * num_stages)):
            ways[end] = ways[end - num_stages]
            for other, away in needs[end]:
                np.maximum(ways[end], ways[other + num_stages] + away, out=ways[end])
            ways[end] += self._inputs[end - num_stages]
        return ways

    @cached_property
    def _ways_back(self) -> Ints:
        """Least time from the end of a stage's part for inputs until everything that depends on it is done."""
        back = self._weights.copy()
        for stage in range(self._num_stages):
            for other, away in self._needs[self._num_stages + stage]:
                back[other] = max(back[other], away + self._inputs[stage] + back[stage])
        return back

    @cached_property
    def _needs(self) -> list[list[tuple[int, int]]]:
        """For each end, the stages that it needs and the least time of the transfer."""
        problem = self._problem
        seats = [problem.replica_seats[first:stop] for first, stop in pairwise(problem.replica_offsets)]
        ranks = [set(problem.seat_rank[own].tolist()) for own in seats]
        needs = [
            (int(other), int(away))
            for other, away in zip(problem.link_stage[NEEDS], problem.link_ps[NEEDS], strict=True)
        ]
        return [
            [(other, 0 if ranks[other] & ranks[end % self._num_stages] else away) for other, away in needs[first:stop]]
            for end, (first, stop) in enumerate(pairwise(problem.link_offsets[NEEDS]))
        ]
