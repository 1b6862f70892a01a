"""The space of plans, divided into slicing problems, each solved exactly.

A plan is a number of microbatches, a schedule, a layout of ranks, and a slicing into replicated stages. For each
combination of the first three, two kinds of slicing problems are solved:

- **equal**: for every R that divides the ranks, D / R stages of R replicas each (R = D is data parallelism, R = 1 a
  pipeline without replicas);
- **unequal**: any number of replicas per stage. Since this includes the equal problems, only slicings about as fast as
  the best known one are searched; most of these problems end after a few bounds.

The best slicing of each problem becomes a candidate; its estimate is the closed form of `slicing`. For your own
schedule, the closed form and (in unequal problems) the microbatches in flight, those of 1F1B, are only assumptions to
choose and order candidates; the reported step times and memory are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.methods.slicing.assemble import Integers, assume_in_flight, make_problem
from meshwright.planner.methods.slicing.dynamic_program import SlicingProblem, memory_of, solve_slicing
from meshwright.planner.problem import divisors
from meshwright.planner.rank_layouts import Layout, LayoutName, Places, find_places
from meshwright.planner.search_method import SearchState
from meshwright.planner.space import Space
from meshwright.planner.stage_tables import Tables, settle_stage
from meshwright.program import SCHEDULES, max_in_flight
from meshwright.spec import Plan, ScheduleError, slice_graph

# Up to this number of ranks, unequal stages may have any number of replicas; beyond, numbers that divide the ranks or
# fill whole nodes (the dynamic program grows with the square of the ranks).
MAX_RANKS_FOR_ANY_REPLICAS = 256
# Unequal slicings are candidates up to this multiple of the lowest known estimate: the closed form does not distinguish
# GPipe from 1F1B, and its error (waiting between unequal stages) is a few per cent.
UNEQUAL_SLACK = 1.05
# Equal slicings are candidates up to this multiple of another setting's result: they are simulated for comparison.
EQUAL_SLACK = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One slicing problem: microbatch size, schedule, layout, and the allowed slicings."""

    size: int
    schedule: str
    layout: Layout
    replicas: tuple[int, ...]
    num_stages: int | None
    cutoff_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """The best plan of one slicing problem.

    ``plan`` is for a team's local graph. ``estimate_s`` is its closed-form step time. ``found_in`` is the problem, and
    ``search`` can solve it again.
    """

    plan: Plan
    estimate_s: float
    found_in: _Search
    search: CandidateSearch

    @property
    def whole(self) -> Plan:
        """The same plan for the whole graph."""
        return self.search.space.whole(self.plan)

    @property
    def shape(self) -> tuple[int, ...]:
        """A tuple of the number of devices, the number of devices per team, and the replicas of each stage."""
        setting = self.search.space.setting
        return setting.num_devices, setting.sharding.width, *(len(stage.ranks) for stage in self.plan.stages)


class CandidateSearch:
    """Solves all slicing problems of one space (setting) under the given schedules, and caches what they share."""

    def __init__(self, space: Space, schedules: Sequence[str], state: SearchState) -> None:
        self.space, self._state = space, state
        # Without a backward, all schedules are equal.
        self._schedules = tuple(schedules[:1] if space.workload.kind == "inference" else schedules)
        self._places: dict[tuple[Layout, tuple[int, ...]], Places] = {}
        self._beside: dict[_Search, NDArray[np.float64]] = {}

    def run(self, best_s: float = math.inf) -> list[PlanCandidate]:
        """Return all candidates, the shortest estimate first; equal estimates in the order of the search.

        ``best_s`` is the best known step time in seconds; much slower candidates are left out.
        """
        found: list[PlanCandidate] = []
        for size in self._sizes("slice into equal replicas"):
            for schedule in self._schedules:
                found += filter(None, map(self._solve, self._equal(size, schedule, best_s * EQUAL_SLACK)))
        best_s = min([best_s, *(candidate.estimate_s for candidate in found)])
        for size in self._sizes("slice into unequal replicas"):
            for schedule in self._schedules:
                for candidate in filter(None, map(self._solve, self._unequal(size, schedule, best_s * UNEQUAL_SLACK))):
                    best_s = min(best_s, candidate.estimate_s)
                    found.append(candidate)
        distinct = {candidate.plan: candidate for candidate in reversed(found)}
        return sorted(distinct.values(), key=lambda candidate: (candidate.estimate_s, found.index(candidate)))

    def _sizes(self, task: str) -> Iterator[int]:
        """Yield the microbatch sizes, until time is over."""
        sizes = self.space.microbatch_sizes
        for done, size in enumerate(sizes):
            if self._state.seconds_left() <= 0:
                return
            self._state.events.progress(task, done, len(sizes))
            yield size
        self._state.events.progress(task, len(sizes), len(sizes))

    @property
    def num_covered(self) -> int:
        """The number of slicings among which the problems of this space choose."""
        sizes, schedules = self.space.microbatch_sizes, self._schedules
        pairs = list(product(sizes, schedules))
        searches = [search for size, name in pairs for search in (*self._equal(size, name), *self._unequal(size, name))]
        return sum(self._num_slicings(search) for search in searches)

    def _equal(self, size: int, schedule: str, cutoff_s: float = math.inf) -> Iterator[_Search]:
        space = self.space
        for replicas in space.shareable(divisors(space.num_ranks), size):
            num_stages = space.num_ranks // replicas
            if space.num_stages and num_stages not in space.num_stages:
                continue
            if num_stages == 1 and schedule == "gpipe" and "1f1b" in self._schedules:
                # With one stage, 1F1B computes the same in the same time and holds one microbatch.
                continue
            for name in self._layouts(num_stages, replicas):
                yield _Search(
                    size=size,
                    schedule=schedule,
                    layout=Layout(name=name, num_ranks=space.num_ranks, num_stages=num_stages),
                    replicas=(replicas,),
                    num_stages=None,
                    cutoff_s=cutoff_s,
                )

    def _unequal(self, size: int, schedule: str, cutoff_s: float = math.inf) -> Iterator[_Search]:
        for name, num_stages in product(self._layouts(0, 0), self.space.num_stages or (None,)):
            yield _Search(
                size=size,
                schedule=schedule,
                layout=Layout(name=name, num_ranks=self.space.num_ranks),
                replicas=self._choices(size),
                num_stages=num_stages,
                cutoff_s=cutoff_s,
            )

    def _layouts(self, num_stages: int, replicas: int) -> Iterator[LayoutName]:
        yield "stage-major"
        if len(self.space.cluster.nodes) > 1 and num_stages > 1 and replicas > 1:
            yield "replica-major"
        kinds = {self.space.cluster.device_kind(rank).name for rank in range(self.space.num_ranks)}
        if len(kinds) > 1 and num_stages != 1:
            yield "reversed"

    def _choices(self, size: int) -> tuple[int, ...]:
        num_ranks = self.space.num_ranks
        if num_ranks <= MAX_RANKS_FOR_ANY_REPLICAS:
            return self.space.shareable(range(1, num_ranks + 1), size)
        per_node = max(node.num_devices for node in self.space.cluster.nodes)
        whole = (r for r in range(1, num_ranks + 1) if num_ranks % r == 0 or r % per_node == 0)
        return self.space.shareable(whole, size)

    def _solve(self, search: _Search) -> PlanCandidate | None:
        slicing = solve_slicing(
            self._problem(search), replicas=search.replicas, num_stages=search.num_stages, cutoff_s=search.cutoff_s
        )
        if slicing is None:
            return None
        plan = self._plan(
            self.space.tables(search.size), search.schedule, search.layout, slicing.bounds, slicing.replicas
        )
        return PlanCandidate(plan=plan, estimate_s=slicing.seconds, found_in=search, search=self)

    def _problem(self, search: _Search) -> SlicingProblem:
        tables = self.space.tables(search.size)
        num_layers = len(tables.graph.layers)
        return make_problem(
            tables,
            self._find_places(search.layout, search.replicas),
            in_flight=self._in_flight(tables, search.schedule, search.layout, search.replicas),
            beside=self._beside.setdefault(search, np.zeros((num_layers, num_layers + 1))),
            exchange=self.space.exchange,
            workload=self.space.workload,
            cost=self.space.cost,
            offload=self.space.offload,
        )

    def next_best(self, candidate: PlanCandidate, peak_bytes: Sequence[int]) -> PlanCandidate | None:
        """Return the next plan of the same problem, after the simulation of a candidate exceeded memory.

        ``peak_bytes`` has the simulated bytes of each rank. Returns None if the problem has no other plan. Until now,
        the bytes of stages were lower bounds (`stage_bytes`). This call computes the exact bytes of the candidate's
        stages and stores them for all problems of the microbatch size. Further bytes of the simulation (transfers in
        flight) are stored for this problem only.
        """
        search, plan = candidate.found_in, candidate.plan
        tables, problem = self.space.tables(search.size), self._problem(search)
        before = 0
        for stage, cut in zip(plan.stages, slice_graph(tables.graph, plan.bounds), strict=True):
            settle_stage(tables, cut, (stage.start, stage.stop), len(stage.ranks), self.space.workload, self.space.cost)
            known = memory_of(problem, stage.start, stage.stop, before, len(stage.ranks))
            shown = max(peak_bytes[rank] for rank in stage.ranks)
            if shown > problem.memory_limit[before, len(stage.ranks)]:
                self._beside[search][stage.start, stage.stop] += max(shown - known, 0.0)
            before += len(stage.ranks)
        return self._solve(search)

    def _in_flight(self, tables: Tables, schedule: str, layout: Layout, replicas: tuple[int, ...]) -> Integers:
        """Return the microbatches in flight; for a user's schedule, counted if the shape is known before slicing."""
        known = assume_in_flight(schedule, tables.num_microbatches, layout.num_ranks, self.space.workload.kind)
        if schedule in SCHEDULES or self.space.workload.kind == "inference" or len(replicas) > 1:
            return known
        (take,), num_layers = replicas, len(tables.graph.layers)
        num_stages = layout.num_ranks // take
        if num_stages > num_layers or take > tables.num_microbatches:
            return known
        edges = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
        even = self._plan(tables, schedule, layout, tuple(pairwise(edges)), (take,) * num_stages)
        # An error occurs again, and is reported, when the plan itself is simulated.
        with suppress(ScheduleError):
            for stage in range(num_stages):
                known[stage * take, take] = max_in_flight(even, stage)
        return known

    def _find_places(self, layout: Layout, replicas: tuple[int, ...]) -> Places:
        key = layout, replicas
        if key not in self._places:
            self._places[key] = find_places(
                layout,
                self.space.cluster,
                self.space.cost,
                replicas=replicas,
                bucket_bytes=self.space.exchange.bucket_bytes,
                memory=self.space.memory,
                shard_size=self.space.exchange.shard_size,
            )
        return self._places[key]

    def _plan(
        self, tables: Tables, schedule: str, layout: Layout, bounds: Sequence[tuple[int, int]], replicas: Sequence[int]
    ) -> Plan:
        return self.space.make_plan(layout.stages(bounds, replicas), tables.microbatch_size, schedule)

    def _num_slicings(self, search: _Search) -> int:
        """Return the number of ways to cut the layers into stages and to divide the ranks among them."""
        num_layers = len(self.space.problem.graph_for(search.size).layers)
        num_ranks, replicas = search.layout.num_ranks, search.replicas
        stages = [search.num_stages] if search.num_stages else range(1, min(num_layers, num_ranks) + 1)
        if len(replicas) == 1:
            return sum(math.comb(num_layers - 1, s - 1) for s in stages if s * replicas[0] == num_ranks)
        return sum(math.comb(num_layers - 1, s - 1) * math.comb(num_ranks - 1, s - 1) for s in stages)
