"""FlexFlow's Markov chain over plans instead of SOAP strategies: the search method `flexflow`.

A SOAP strategy may split every op differently; a plan has stages of neighbouring layers, their replicas, and one
sharding for all. So this chain walks over plans. Each move changes one thing of the current plan, if the problem leaves
a choice:

    boundary          moves to any cut between its neighbours
    replicas          a rank moves from one stage to another
    stages            a stage is cut in two, or two neighbours are joined
    ranks             two ranks are swapped
    microbatch size   another size
    schedule          another schedule
    setting           other devices, sharding, ZeRO, ...

Every new plan is simulated once. The energy of a plan is its step time, plus 1 ms for each MB beyond a device's memory,
as in FlexFlow; a plan that does not fit also counts its step time twice. `temperature` sets the temperature. The chain
starts from data parallelism, or from the best plan of another method, and returns to its best plan after each round. It
ends at the deadline, after `MOST_PLANS` plans, after a round without a new plan, or when the second half of the plans
so far brought no improvement (the paper's rule).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.methods.flexflow.temperature import adjust, calibrate
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.spec import MeshwrightError, Plan, StagePlan, check_plan
from meshwright.spec.schedules import BASIC_SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from meshwright.planner.evaluate import RankedPlan
    from meshwright.planner.problem import Problem
from meshwright.planner.space import Space

MOST_PLANS = 400
LEAST_PLANS = 64
# Plans to find the temperature from, and in a round.
_WARM_UP, _ROUND = 16, 32
# Moves that lead to no new plan, before the chain is at its end.
_MOST_IDLE = 200
# FlexFlow's: a millisecond for each MB beyond the memory.
_PENALTY_S_PER_BYTE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A state of the chain: a plan before it is checked.

    ``size``: the microbatch size. ``cuts``: the first layer of each stage except the first. ``replicas``: the number of
    ranks of each stage. ``ranks``: the ranks of all stages, stage by stage.
    """

    space: Space
    size: int
    schedule: str
    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    ranks: tuple[int, ...]

    def plan(self) -> Plan:
        """Return the plan of this point. Raises MeshwrightError if the plan is not valid."""
        space, graph = self.space, self.space.graph_for(self.size)
        ends, firsts = (*self.cuts, len(graph.layers)), np.cumsum([0, *self.replicas])
        stages = tuple(
            StagePlan(start=start, stop=stop, ranks=self.ranks[first : first + count])
            for start, stop, first, count in zip((0, *self.cuts), ends, firsts, self.replicas, strict=False)
        )
        plan = space.make_plan(stages, self.size, self.schedule if self.schedule in BASIC_SCHEDULES else "1f1b")
        if self.schedule not in BASIC_SCHEDULES:
            (chunks, *_) = space.problem.choices.num_chunks
            plan = adopt_schedule(plan, self.schedule, graph, space.cost, num_chunks=chunks)
        check_plan(plan, graph)
        whole = replace(space.whole(plan), cluster=space.problem.cluster.name)
        check_plan(whole, space.problem.graph_for(whole.microbatch_size), space.problem.cluster)
        return whole


def flexflow(problem: Problem, state: SearchState) -> Steps:
    """Propose the plans on a Markov chain that starts from the best plan so far, or from data parallelism."""
    spaces = list(problem.spaces())
    walker = _Walker(spaces, state.random)
    here, energy = yield from _begin(walker, state)
    if here is None:
        return
    best, best_energy, best_at = here, energy, walker.num_seen
    rises: list[float] = []
    for _ in range(_WARM_UP):
        drawn = walker.draw(here)
        if drawn is None:
            return
        point, found = yield from walker.look(drawn, state)
        if energy < found < math.inf:
            rises.append(found - energy)
        if found < best_energy:
            best, best_energy, best_at = point, found, walker.num_seen
    beta = calibrate(np.array(rises)) or 100.0 / max(energy, 1e-12)
    here, energy = best, best_energy
    while walker.num_seen < min(MOST_PLANS, max(2 * best_at, LEAST_PLANS)):
        num_longer, num_accepted, num_before = 0, 0, walker.num_seen
        for _ in range(_ROUND):
            drawn = walker.draw(here)
            if drawn is None or state.seconds_left() <= 0:
                return
            point, found = yield from walker.look(drawn, state)
            is_taken = found <= energy or state.random.random() < math.exp(-beta * (found - energy))
            num_longer += found > energy
            num_accepted += found > energy and is_taken
            if is_taken:
                here, energy = point, found
            if found < best_energy:
                best, best_energy, best_at = point, found, walker.num_seen
        if walker.num_seen == num_before:
            # All around is known.
            return
        beta = adjust(beta, num_accepted, num_longer)
        here, energy = best, best_energy


def _begin(walker: _Walker, state: SearchState) -> Generator[Proposal, RankedPlan | None, tuple[Point | None, float]]:
    """The first point that a plan can be made of and simulated: that of the best plan, or data parallelism."""
    points = [point for point in (walker.of_best(state), *walker.data_parallel()) if point is not None]
    for point in points:
        if walker.plan_of(point) is not None:
            found = yield from walker.look(point, state)
            if found[1] < math.inf:
                return found
    for _ in range(_MOST_IDLE):
        drawn = walker.draw(points[-1]) if points else None
        if drawn is None:
            break
        found = yield from walker.look(drawn, state)
        if found[1] < math.inf:
            return found
    return None, math.inf


class _Walker:
    """Draws neighbours of points, and remembers what their plans took."""

    def __init__(self, spaces: list[Space], random: np.random.Generator) -> None:
        self.spaces, self.random = spaces, random
        self.energies: dict[Plan, float] = {}
        self._plans: dict[Point, Plan | None] = {}
        self.moves: list[Callable[[Point], Point]] = [
            self._move_cut,
            self._move_rank,
            self._split_or_join,
            self._swap,
            self._resize,
            self._reschedule,
            self._resettle,
        ]

    @property
    def num_seen(self) -> int:
        """The number of plans that were simulated."""
        return len(self.energies)

    def look(self, point: Point, state: SearchState) -> Generator[Proposal, RankedPlan | None, tuple[Point, float]]:
        """Return the point and the energy of its plan in seconds; infinite if it has no plan that can be simulated.

        Each plan is simulated only once.
        """
        plan = self.plan_of(point)
        if plan is None:
            return point, math.inf
        if plan not in self.energies:
            state.count(considered=1)
            result = yield Proposal(plan)
            self.energies[plan] = math.inf if result is None else _energy(result)
        return point, self.energies[plan]

    def plan_of(self, point: Point) -> Plan | None:
        """Return the plan of a point; None if it has no valid plan."""
        if point not in self._plans:
            try:
                self._plans[point] = point.plan()
            except MeshwrightError:
                self._plans[point] = None
        return self._plans[point]

    def draw(self, point: Point) -> Point | None:
        """Return a random point with another valid plan, one move away; None if no such point is found."""
        here = self.plan_of(point)
        for _ in range(_MOST_IDLE):
            move = self.moves[self.random.integers(len(self.moves))]
            drawn = move(point)
            allowed = drawn.space.num_stages
            if drawn == point or (allowed and len(drawn.replicas) not in allowed):
                continue
            plan = self.plan_of(drawn)
            if plan is not None and plan != here:
                return drawn
        return None

    def data_parallel(self) -> list[Point]:
        """Return a data-parallel starting point for each space and microbatch size, the largest size first.

        Each has one stage on all ranks, or the smallest allowed number of equal stages.
        """
        found = []
        for space in self.spaces:
            schedule = next((name for name in space.schedules if name in BASIC_SCHEDULES), space.schedules[0])
            for size in sorted(space.microbatch_sizes, reverse=True):
                count = min(space.num_stages or (1,))
                found.append(_even(space, size, schedule, count))
        return [point for point in found if point is not None]

    def of_best(self, state: SearchState) -> Point | None:
        """Return the point of the best plan of the search; None if no point of the chain has this plan."""
        if state.best is None or state.best.plan.has_virtual_stages:
            return None
        plan = state.best.plan
        for space in self.spaces:
            point = Point(
                space=space,
                size=space.workload.global_batch // plan.num_microbatches,
                schedule=plan.schedule,
                cuts=tuple(stage.start for stage in plan.stages[1:]),
                replicas=tuple(len(stage.ranks) for stage in plan.stages),
                ranks=tuple(rank for stage in plan.stages for rank in stage.ranks),
            )
            if len(point.ranks) == space.num_ranks and self.plan_of(point) == replace(plan, stages=_bare(plan)):
                return point
        return None

    def _pick(self, count: int) -> int:
        return int(self.random.integers(count))

    def _move_cut(self, point: Point) -> Point:
        if not point.cuts:
            return point
        at = self._pick(len(point.cuts))
        ends = (0, *point.cuts, len(point.space.graph_for(point.size).layers))
        drawn = int(self.random.integers(ends[at] + 1, ends[at + 2]))
        return replace(point, cuts=(*point.cuts[:at], drawn, *point.cuts[at + 1 :]))

    def _move_rank(self, point: Point) -> Point:
        giver, taker = self._pick(len(point.replicas)), self._pick(len(point.replicas))
        if point.replicas[giver] < 2 or giver == taker:
            return point
        counts = list(point.replicas)
        counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
        return replace(point, replicas=tuple(counts))

    def _split_or_join(self, point: Point) -> Point:
        at, counts, cuts = self._pick(len(point.replicas)), list(point.replicas), list(point.cuts)
        if self.random.random() < 0.5 and at < len(cuts):
            counts[at : at + 2] = [counts[at] + counts[at + 1]]
            return replace(point, replicas=tuple(counts), cuts=(*cuts[:at], *cuts[at + 1 :]))
        ends = (0, *cuts, len(point.space.graph_for(point.size).layers))
        if counts[at] < 2 or ends[at + 1] - ends[at] < 2:
            return point
        mine = int(self.random.integers(1, counts[at]))
        cut = int(self.random.integers(ends[at] + 1, ends[at + 1]))
        counts[at : at + 1] = [mine, counts[at] - mine]
        return replace(point, replicas=tuple(counts), cuts=tuple(sorted((*cuts, cut))))

    def _swap(self, point: Point) -> Point:
        ranks = list(point.ranks)
        first, second = self._pick(len(ranks)), self._pick(len(ranks))
        ranks[first], ranks[second] = ranks[second], ranks[first]
        return replace(point, ranks=tuple(ranks))

    def _resize(self, point: Point) -> Point:
        return replace(point, size=point.space.microbatch_sizes[self._pick(len(point.space.microbatch_sizes))])

    def _reschedule(self, point: Point) -> Point:
        return replace(point, schedule=point.space.schedules[self._pick(len(point.space.schedules))])

    def _resettle(self, point: Point) -> Point:
        """The same stages under another setting, with ranks dealt out again where it has more or fewer."""
        space = self.spaces[self._pick(len(self.spaces))]
        size = min(space.microbatch_sizes, key=lambda size: (abs(size - point.size), size))
        if space.num_ranks == point.space.num_ranks:
            return replace(point, space=space, size=size)
        return _even(space, size, point.schedule, min(len(point.replicas), space.num_ranks)) or point


def _energy(result: RankedPlan) -> float:
    """Seconds of a step, and the penalty for memory."""
    pairs = zip(result.reserved_bytes, result.memory_limit_bytes, strict=True)
    beyond = sum(max(0, peak - limit) for peak, limit in pairs)
    return result.step_time_s + _PENALTY_S_PER_BYTE * beyond + (0.0 if result.fits else result.step_time_s)


def _even(space: Space, size: int, schedule: str, count: int) -> Point | None:
    """So many stages of equal numbers of layers and ranks; None if there are too few of these."""
    num_layers = len(space.graph_for(size).layers)
    if not 1 <= count <= min(num_layers, space.num_ranks):
        return None
    ends = [space.num_ranks * k // count for k in range(count + 1)]
    return Point(
        space=space,
        size=size,
        schedule=schedule,
        cuts=tuple(num_layers * k // count for k in range(1, count)),
        replicas=tuple(int(n) for n in np.diff(ends)),
        ranks=tuple(range(space.num_ranks)),
    )


def _bare(plan: Plan) -> tuple[StagePlan, ...]:
    """The stages without the branches that are written down for schedules."""
    return tuple(replace(stage, feeds=()) for stage in plan.stages)
