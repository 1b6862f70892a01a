"""Find a short order of computations for given stage times, within a memory limit on every rank (`find_orders`).

The model: a stage takes F for a forward, I for a backward's part for inputs, and W for its part for weights. A forward
waits for the forwards of the stages that feed its own stage, a backward for the backwards of the stages that its own
stage feeds (`Plan.feeds`). A transfer to another rank takes C in forwards and G in backwards, without contention. A
microbatch holds K bytes of a stage from the start of its forward to the end of its part for weights. The length of a
step is the time from the first start to the last end on any rank.

    greedy     a list scheduler (`write_greedily`), run for a grid of choices: how far ahead (in round trips, or up to
               all memory), what goes first, which gaps are filled
    improve    the best of them are improved by moving computations on the critical path
    named      every named schedule that supports the layout, where it fits: the result is never slower than these
    bound      no order can be shorter (`order_bounds`)

The loops are compiled (also those of `order_bounds`). The same input gives the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.compiled import compiled
from meshwright.program.order_bounds import (
    BACKWARD,
    FEEDS,
    FORWARD,
    INPUT,
    NEEDS,
    WEIGHT,
    Bounds,
    Columns,
    Ints,
    OrderProblem,
    duration,
    fits,
    improve,
    play,
    seat_of,
)
from meshwright.program.schedules import SCHEDULES, OrderColumns, RankOrders
from meshwright.program.schedules.seats import make_columns
from meshwright.spec import Plan, PlanError

_NEVER = 2**62


class GreedyRule(NamedTuple):
    """How `write_greedily` chooses the next computation of a free rank.

    ``split``: compute backwards in two parts. ``forward_first``: if a forward and a backward can both run, run the
    forward. ``patience``: do not start a forward if a backward becomes ready within this multiple of the forward's
    time. ``fill``: run a part for weights in a gap of at least this fraction of its time. ``owed``: the most parts for
    weights that may wait (-1: any number). ``deepest_first``: on a rank with several stages choose the last stage that
    is ready, instead of the earliest microbatch.
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


# Whenever a rank is free, a rule chooses what it computes next, in the manner of Qi et al. (Zero Bubble, ICLR 2024,
# section 3.1): forwards ahead as memory allows, backwards as soon as they can, weights in the gaps. All ranks share one
# clock, so a rank knows which values will arrive when.
@compiled
def write_greedily(problem: OrderProblem, cap: Ints, rule: GreedyRule, columns: Columns) -> int:
    """Write into ``columns`` an order in which rank r holds at most ``cap[r]`` bytes; return its length in ps.

    Returns -1 if no rank can continue before all computations are written. The clock advances from decision to
    decision; a rank that has nothing to compute sleeps until a value arrives.
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


# How far ahead ranks may run, in units of the microbatches that one round trip needs; inf: all that memory allows.
# Less memory comes first, so that it wins where more makes nothing shorter.
_AHEAD = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, np.inf)
# Least gap that is filled (as a fraction of the part for weights), and the most parts for weights that may wait.
_FILL = (0.0, 0.5, 1.0)
_OWED = (-1, 0)
_PATIENCE = (0.0, 0.5)
# Number of orders to improve, most moves for each, and most computations played for all of them.
_IMPROVED = 8
_MAX_MOVES = 4_000
_MAX_PLAYED = 6_000_000
# Only every n-th choice is tried if all together would write more computations, because large pipelines take long.
_MAX_WRITTEN = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Times (ps) and memory (bytes) of each stage for one microbatch, and the memory limit of each rank.

    ``forward_ps``, ``inputs_ps`` and ``weights_ps`` are the times of a forward and of a backward's two parts, of shape
    (stages,), or (stages, ranks) where ranks differ. ``sending_ps`` (of activations) and ``returning_ps`` (of
    gradients) count only between two ranks and have one number for each pair of stages of which one feeds the other:
    shape (stages - 1,) for a chain, otherwise in the order of `Plan.feeds` of stage 0, of stage 1 and so on.
    ``kept_bytes`` has shape (stages,), ``limit_bytes`` (ranks,). A single number applies to all. By default transfers
    take no time, no bytes are kept and memory is unlimited.
    """

    forward_ps: ArrayLike
    inputs_ps: ArrayLike
    weights_ps: ArrayLike
    sending_ps: ArrayLike = 0
    returning_ps: ArrayLike = 0
    kept_bytes: ArrayLike = 0
    limit_bytes: ArrayLike = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundOrders:
    """The shortest orders found: ``columns`` has one order per rank.

    ``length_ps`` is the length of a step, ``bound_ps`` a lower bound for every order, ``named_ps`` the lengths of the
    named schedules that fit into memory. ``name``: the named schedule that these orders are, "" for a new order.
    """

    columns: tuple[OrderColumns, ...]
    length_ps: int
    bound_ps: int
    named_ps: Mapping[str, int]
    name: str = ""

    @property
    def gap(self) -> float:
        """The length's excess over the lower bound, as a fraction of the bound; 0 if the bound is 0."""
        return self.length_ps / self.bound_ps - 1 if self.bound_ps else 0.0


def find_orders(plan: Plan, times: StageTimes, *, whole: bool = False) -> FoundOrders:
    """Return the shortest orders found for the stages of a plan; the plan's schedule is not used.

    ``whole``: search only orders with whole backwards, as the runtime executes them, and leave out named schedules with
    backwards in two parts. Raises PlanError for times of the wrong shape or below 0, and if no order fits into the
    memory of each rank.
    """
    search = _Search(plan, times, whole=whole)
    named = dict(search.named())
    candidates = sorted(search.greedy(), key=lambda pair: pair[0])[:_IMPROVED]
    found = [(length, "", columns) for length, columns in map(search.improved, candidates)]
    found += [(length, name, columns) for name, (length, columns) in named.items()]
    if not found:
        raise PlanError(
            f"No order of {plan.num_microbatches} microbatches was found within the memory of each rank "
            f"({', '.join(map(str, search.problem.limit[:8].tolist()))} bytes). Allow more memory, or choose smaller "
            "microbatches."
        )
    # Among equal lengths take the order that holds the least memory; then a named one, which is published.
    length, name, columns = min(found, key=lambda item: (item[0], search.held(item[2]), not item[1]))
    return FoundOrders(
        columns=_split_by_rank(columns),
        length_ps=length,
        bound_ps=search.bound,
        named_ps={name: length for name, (length, _) in named.items()},
        name=name,
    )


def make_problem(plan: Plan, times: StageTimes) -> OrderProblem:
    """Return the plan and its times as arrays for the compiled loops.

    Raises PlanError for times of the wrong shape or below 0, and if the plan's replicas have shares.
    """
    if plan.has_shares:
        raise PlanError(
            "The plan's replicas have shares of the microbatches, but orders are found only for replicas that take "
            "turns. Remove the shares, or choose the schedule gpipe or 1f1b."
        )
    num_stages, num_ranks = len(plan.stages), plan.num_ranks
    seats = [(rank, stage) for rank in range(num_ranks) for stage in plan.stages_of(rank)]
    numbers = {(stage, rank): seat for seat, (rank, stage) in enumerate(seats)}
    own = [
        range(plan.stages[s].ranks.index(rank), plan.num_microbatches, len(plan.stages[s].ranks)) for rank, s in seats
    ]
    ranks, stages = np.array(seats, np.int64).T

    def of_seats(name: str) -> Ints:
        given = np.asarray(getattr(times, name), np.int64)
        table = _shaped(given.reshape(-1, 1) if given.ndim == 1 else given, (num_stages, num_ranks), name)
        return np.ascontiguousarray(table[stages, ranks])

    edges = [(stage, target) for stage in range(num_stages) for target in plan.feeds(stage)]
    source, target = np.array(edges, np.int64).reshape(-1, 2).T
    away = np.concatenate(
        [_shaped(getattr(times, name), source.shape, name) for name in ("sending_ps", "returning_ps")]
    )
    # Forwards of all stages, then their backwards, for which each edge is reversed.
    first, last = (np.concatenate(ends) for ends in ((source, target), (target, source)))
    backwards = num_stages * (np.arange(len(away)) >= len(edges))
    links = [
        _by_end(last + backwards, first, away, 2 * num_stages),
        _by_end(first + backwards, last, away, 2 * num_stages),
    ]
    offsets, others, between = (np.stack(rows) for rows in zip(*links, strict=True))

    return OrderProblem(
        seat_offsets=np.searchsorted(ranks, np.arange(num_ranks + 1)).astype(np.int64),
        seat_stage=np.ascontiguousarray(stages),
        seat_rank=np.ascontiguousarray(ranks),
        seat_first=np.array([each.start for each in own], np.int64),
        seat_step=np.array([each.step for each in own], np.int64),
        seat_count=np.array([len(each) for each in own], np.int64),
        replica_offsets=np.cumsum([0, *(len(stage.ranks) for stage in plan.stages)]).astype(np.int64),
        replica_seats=np.array(
            [numbers[s, rank] for s, item in enumerate(plan.stages) for rank in item.ranks], np.int64
        ),
        forward=of_seats("forward_ps"),
        inputs=of_seats("inputs_ps"),
        weights=of_seats("weights_ps"),
        link_offsets=offsets,
        link_stage=others,
        link_ps=between,
        kept=_shaped(times.kept_bytes, (num_stages,), "kept_bytes").copy(),
        limit=_shaped(times.limit_bytes, (num_ranks,), "limit_bytes").copy(),
        num_microbatches=plan.num_microbatches,
    )


class _Search:
    def __init__(self, plan: Plan, times: StageTimes, *, whole: bool) -> None:
        problem = make_problem(plan, times)
        if whole:  # as if the stage before needed all of a backward
            problem = problem._replace(inputs=problem.inputs + problem.weights, weights=np.zeros_like(problem.weights))
        self.problem, self._bounds = problem, Bounds(problem)
        self._plan, self._whole = plan, whole
        counts = self.problem.seat_count * (2 if whole else 3)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])[self.problem.seat_offsets].astype(np.int64)

    def named(self) -> Iterator[tuple[str, tuple[int, Columns]]]:
        """Yield length and orders of every named schedule that supports the layout, fits, and does not deadlock."""
        for name, write in SCHEDULES.items():
            try:
                plan = replace(self._plan, schedule=name, schedule_hash="")
                columns = _widen(write(plan))
            except PlanError:
                continue
            in_parts = len(columns.opcode) > 2 * int(self.problem.seat_count.sum())
            if not (self._whole and in_parts) and fits(self.problem, columns):
                length = play(self.problem, columns, np.empty(len(columns.opcode), np.int64))
                if length >= 0:
                    yield name, (length, columns)

    def greedy(self) -> Iterator[tuple[int, Columns]]:
        """Yield length and orders for every choice of the list scheduler that ends, without duplicates."""
        seen: set[bytes] = set()
        choices = list(product(_AHEAD, self._rules()))
        step = -(-len(choices) * int(self._offsets[-1]) // _MAX_WRITTEN)
        for ahead, rule in choices[::-step][::-1]:
            columns = _empty(self._offsets)
            length = write_greedily(self.problem, self._cap(ahead), rule, columns)
            key = columns.opcode.tobytes() + columns.stage.tobytes()
            if length >= 0 and key not in seen:
                seen.add(key)
                yield length, columns
            if length == self.bound:
                return

    def _rules(self) -> list[GreedyRule]:
        whole, single = self._whole, not self._plan.has_virtual_stages
        return [
            GreedyRule(not whole, forward_first, patience, fill, owed, deepest_first)
            for forward_first, patience in product((False, True), _PATIENCE)
            for fill, owed in ([(0.0, -1)] if whole else product(_FILL, _OWED))
            for deepest_first in ((True,) if single else (True, False))
        ]

    def held(self, columns: Columns) -> int:
        """Return the most bytes that ranks hold, summed over ranks."""
        opens, closes = columns.opcode == FORWARD, (columns.opcode == BACKWARD) | (columns.opcode == WEIGHT)
        held = np.cumsum(self.problem.kept[columns.stage] * (opens.astype(np.int64) - closes))
        # Every rank ends with 0 bytes, so one cumulative sum covers all of them.
        return int(np.maximum.reduceat(held, columns.offsets[:-1]).sum())

    def improved(self, candidate: tuple[int, Columns]) -> tuple[int, Columns]:
        """Return the candidate after local improvement."""
        columns = candidate[1]
        rounds = min(_MAX_MOVES, _MAX_PLAYED // (_IMPROVED * len(columns.opcode)))
        return improve(self.problem, columns, rounds, self.bound, len(columns.opcode)), columns

    def _cap(self, ahead: float) -> Ints:
        """Return the bytes that ranks may hold if they run ahead by ``ahead`` round trips; at least one microbatch."""
        problem = self.problem
        if ahead == np.inf:
            return problem.limit
        work = problem.forward + problem.inputs + problem.weights
        busy = np.add.reduceat(work * problem.seat_count, problem.seat_offsets[:-1]).max() / problem.num_microbatches
        kept = problem.kept[problem.seat_stage]
        # Each replica of a stage with R replicas has every R-th microbatch.
        number = np.ceil(ahead * self._bounds.round_trips[problem.seat_stage] / max(busy, 1) / problem.seat_step)
        cap = np.add.reduceat(kept * np.maximum(number, 1).astype(np.int64), problem.seat_offsets[:-1])
        return np.minimum(cap, problem.limit)

    @property
    def bound(self) -> int:
        """Lower bound of the length of any order, in ps."""
        return self._bounds.length


def _by_end(ends: Ints, stages: Ints, away: Ints, num_ends: int) -> tuple[Ints, Ints, Ints]:
    """Return where the links of each end begin, and their stages and times in that order."""
    order = np.argsort(ends, kind="stable")
    return np.searchsorted(ends[order], np.arange(num_ends + 1)).astype(np.int64), stages[order], away[order]


def _shaped(values: ArrayLike, shape: tuple[int, ...], name: str) -> NDArray[np.int64]:
    try:
        found = np.broadcast_to(np.asarray(values, np.int64), shape)
    except ValueError:
        raise PlanError(f"{name} has shape {np.shape(values)}; expected {shape}, or one number for all.") from None
    if found.size and found.min() < 0:
        raise PlanError(f"{name} has the number {found.min()}; expected 0 or more.")
    return found


def _empty(offsets: Ints) -> Columns:
    opcode, stage, microbatch, joint = np.zeros((4, int(offsets[-1])), np.int64)
    return Columns(offsets, opcode, stage, microbatch, joint)


def _widen(orders: RankOrders) -> Columns:
    columns = orders.columns
    given = (columns.opcode, columns.stage, columns.microbatch, columns.joint)
    return Columns(orders.offsets, *(column.astype(np.int64) for column in given))


def _split_by_rank(columns: Columns) -> tuple[OrderColumns, ...]:
    return tuple(
        make_columns(*(column[begin:end] for column in columns[1:])) for begin, end in pairwise(columns.offsets)
    )
