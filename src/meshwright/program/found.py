"""Find a short order of computations for given stage times, within a memory limit on every rank.

The model: stage s takes F, I and W for a forward, the part of a backward for inputs and that for weights. A forward
needs those of all stages that feed its own, a backward those of all that its own feeds (`Plan.feeds`); a transfer to
another rank takes C forwards and G backwards, without contention. A microbatch holds K bytes of a
stage from the start of its forward to the end of its part for weights. The length of a step is the time from the first
start to the last end on any rank.

    greedy     a list scheduler in the manner of Qi et al. (Zero Bubble, ICLR 2024, section 3.1): forwards as far ahead
               as allowed, backwards as soon as they can, weights in gaps. It is run for a grid of choices: how far
               ahead (in round trips, or up to all memory), what goes first, which gaps are filled.
    improve    the best of them are improved by moving computations on the critical path
    named      every named schedule that supports the layout, where it fits: the result is never slower than these
    bound      no order can be shorter (`order_bounds`)

The loops are compiled (`list_scheduler`, `order_moves`, `order_loops`). The same input gives the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.program.list_scheduler import GreedyRule, write_greedily
from meshwright.program.order_bounds import Bounds
from meshwright.program.order_loops import BACKWARD, FORWARD, WEIGHT, Columns, Ints, OrderProblem, fits, play
from meshwright.program.order_moves import improve
from meshwright.program.schedules import SCHEDULES, OrderColumns, RankOrders
from meshwright.program.schedules.columns import make_columns
from meshwright.spec.errors import PlanError
from meshwright.spec.plan import Plan

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
    """Picoseconds and bytes for one microbatch, and memory limits of ranks.

    ``forward_ps``, ``inputs_ps`` and ``weights_ps`` have shape (stages,), or (stages, ranks) where ranks differ;
    ``sending_ps`` and ``returning_ps`` (of the gradient) count only between two ranks and have one number for each
    pair of stages of which one feeds the other: (stages - 1,) for a chain, otherwise `Plan.feeds` of stage 0, of stage
    1 and so on. ``kept_bytes`` (stages,), ``limit_bytes`` (ranks,). By default times and bytes are 0 and memory is
    unlimited.
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
    """The orders of all ranks, by rank, their length, the bound, and the lengths of the named schedules that fit.

    ``name``: the named schedule with this order, "" for a new one.
    """

    columns: tuple[OrderColumns, ...]
    length_ps: int
    bound_ps: int
    named_ps: Mapping[str, int]
    name: str = ""

    @property
    def gap(self) -> float:
        """The relative excess of the length over the bound."""
        return self.length_ps / self.bound_ps - 1 if self.bound_ps else 0.0


def find_orders(plan: Plan, times: StageTimes, *, whole: bool = False) -> FoundOrders:
    """Return the shortest orders found for the stages of a plan; the plan's own schedule does not matter.

    ``whole``: only whole backwards, as the runtime executes them (named schedules in two parts are left out then).
    Raises PlanError for times of the wrong shape or below 0, and if not even one microbatch fits on some rank.
    """
    search = _Search(plan, times, whole=whole)
    named = dict(search.named())
    candidates = sorted(search.greedy(), key=lambda pair: pair[0])[:_IMPROVED]
    found = [(length, "", columns) for length, columns in map(search.improved, candidates)]
    found += [(length, name, columns) for name, (length, columns) in named.items()]
    if not found:
        raise PlanError(
            f"No order of {plan.num_microbatches} microbatches was found within the memory of each rank "
            f"({', '.join(map(str, search.problem.limit[:8].tolist()))} bytes). Give more, or smaller microbatches."
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
    """Return the plan and its times as the loops read them. Raises PlanError for times of wrong shape or below 0."""
    if plan.has_shares:
        raise PlanError(
            "Replicas have shares of the microbatches; orders are found for replicas that take turns. Remove the "
            "shares, or choose the schedule gpipe or 1f1b."
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
