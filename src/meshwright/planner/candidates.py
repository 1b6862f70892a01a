"""The space of plans, cut into slicing problems, each solved exactly.

A plan is a number of microbatches, a schedule, a layout of ranks, and a slicing into replicated stages. For each of the
first three, two kinds of slicing problems are solved:

- **equal**: for every R that divides the ranks, D / R stages of R replicas each (R = D is data parallelism, R = 1 a
  pipeline without replicas);
- **unequal**: any number of replicas per stage. It contains the equal ones, so only a slicing that is about as cheap as
  the best one known is looked for; most of these problems end after a few bounds.

The best slicing of each problem becomes a candidate with the closed form of `slicing` as estimate. For a user's own
schedule the closed form and, in unequal problems, the microbatches in flight (those of 1F1B) are assumptions that only
choose and order candidates; what is told of a plan is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.planner.dynamic_program import SlicingProblem, memory_of
from meshwright.planner.placement import Layout, LayoutName, Places, find_places
from meshwright.planner.problem import (
    Integers,
    Tables,
    assume_in_flight,
    make_problem,
    make_tables,
    settle_stage,
)
from meshwright.planner.slicing import solve_slicing
from meshwright.planner.structure import Structure, find_structure
from meshwright.program import SCHEDULES, max_in_flight
from meshwright.spec import (
    Cluster,
    EventSink,
    GradientExchange,
    Graph,
    Offload,
    Plan,
    ScheduleError,
    Workload,
    slice_graph,
)
from meshwright.spec.offload import ON_DEVICE

# Unequal replicas are searched with every number of replicas up to this many ranks; beyond, with the numbers that
# divide the ranks or fill whole nodes (the dynamic program grows with the square of the ranks).
MAX_RANKS_FOR_ANY_REPLICAS = 256
# Unequal slicings are candidates up to this multiple of the least estimate known: the closed form does not tell GPipe
# from 1F1B, and misses what it does not model (waiting between unequal stages) by a few per cent.
UNEQUAL_SLACK = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is searched: the ranks, and which sizes, schedules and numbers of stages are allowed."""

    graph_for: Callable[[int], Graph]
    cluster: Cluster
    workload: Workload
    cost: CostModel
    model: str
    model_sizes: tuple[tuple[str, int], ...]
    num_ranks: int
    microbatch_sizes: tuple[int, ...]
    schedules: tuple[str, ...]
    num_stages: int | None
    memory_limit_bytes: int | None
    exchange: GradientExchange = field(default_factory=GradientExchange)
    offload: Offload = ON_DEVICE
    schedule_hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One slicing problem: microbatch size, schedule, layout, and which slicings are looked for."""

    size: int
    schedule: str
    layout: Layout
    replicas: tuple[int, ...]
    num_stages: int | None
    cutoff_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its closed-form seconds per step, and where it was found."""

    plan: Plan
    estimate_s: float
    found_in: _Search

    @property
    def shape(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(len(stage.ranks) for stage in self.plan.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much was searched: plans covered by the solved problems, problems, and problems without any fitting plan."""

    num_configurations: int
    num_problems: int
    num_infeasible: int


class CandidateSearch:
    """Solves the problems of one space. Tables, places and structures are kept between problems."""

    def __init__(self, space: Space, events: EventSink) -> None:
        self._space = space
        self._events = events
        self._structures: dict[int, tuple[Graph, Structure]] = {}
        self._tables: dict[int, Tables] = {}
        self._places: dict[tuple[Layout, tuple[int, ...]], Places] = {}
        self._beside: dict[_Search, NDArray[np.float64]] = {}
        self._num_configurations = self._num_problems = self._num_infeasible = 0

    @property
    def coverage(self) -> Coverage:
        """What was searched so far."""
        return Coverage(
            num_configurations=self._num_configurations,
            num_problems=self._num_problems,
            num_infeasible=self._num_infeasible,
        )

    def run(self) -> list[Candidate]:
        """All candidates, cheapest estimate first; equal estimates in the order of the search."""
        found: list[Candidate] = []
        sizes = self._space.microbatch_sizes
        for done, size in enumerate(sizes):
            self._events.progress("slice into equal replicas", done, len(sizes))
            for schedule in self._schedules():
                found.extend(self._equal(size, schedule))
        self._events.progress("slice into equal replicas", len(sizes), len(sizes))
        best = min((candidate.estimate_s for candidate in found), default=math.inf)
        for done, size in enumerate(sizes):
            self._events.progress("slice into unequal replicas", done, len(sizes))
            for schedule in self._schedules():
                for candidate in self._unequal(size, schedule, best):
                    best = min(best, candidate.estimate_s)
                    found.append(candidate)
        self._events.progress("slice into unequal replicas", len(sizes), len(sizes))
        distinct = {candidate.plan: candidate for candidate in reversed(found)}
        return sorted(distinct.values(), key=lambda candidate: (candidate.estimate_s, found.index(candidate)))

    def tables(self, microbatch_size: int) -> Tables:
        """Seconds and bytes of all stages at a microbatch size."""
        if microbatch_size not in self._tables:
            space = self._space
            graph = space.graph_for(microbatch_size)
            if id(graph) not in self._structures:
                self._structures[id(graph)] = graph, find_structure(graph)
            structure = self._structures[id(graph)][1]
            self._tables[microbatch_size] = make_tables(
                graph, structure, microbatch_size, space.cluster, space.workload, space.cost, space.offload
            )
        return self._tables[microbatch_size]

    def _schedules(self) -> Sequence[str]:
        # Without a backward there is nothing to order: schedules are all alike.
        return self._space.schedules[:1] if self._space.workload.kind == "inference" else self._space.schedules

    def _equal(self, size: int, schedule: str) -> Iterator[Candidate]:
        space = self._space
        for replicas in (r for r in range(1, space.num_ranks + 1) if space.num_ranks % r == 0):
            num_stages = space.num_ranks // replicas
            if space.num_stages not in (None, num_stages):
                continue
            if num_stages == 1 and schedule == "gpipe" and "1f1b" in space.schedules:
                # One stage: 1F1B computes the same in the same time and holds one microbatch.
                continue
            for name in self._layouts(num_stages, replicas):
                layout = Layout(name=name, num_ranks=space.num_ranks, num_stages=num_stages)
                yield from self._find(
                    _Search(
                        size=size,
                        schedule=schedule,
                        layout=layout,
                        replicas=(replicas,),
                        num_stages=None,
                        cutoff_s=math.inf,
                    )
                )

    def _unequal(self, size: int, schedule: str, best: float) -> Iterator[Candidate]:
        for name in self._layouts(0, 0):
            layout = Layout(name=name, num_ranks=self._space.num_ranks)
            yield from self._find(
                _Search(
                    size=size,
                    schedule=schedule,
                    layout=layout,
                    replicas=self._choices(),
                    num_stages=self._space.num_stages,
                    cutoff_s=best * UNEQUAL_SLACK,
                )
            )

    def _layouts(self, num_stages: int, replicas: int) -> Iterator[LayoutName]:
        yield "stage-major"
        if len(self._space.cluster.nodes) > 1 and num_stages > 1 and replicas > 1:
            yield "replica-major"
        kinds = {self._space.cluster.device_kind(rank).name for rank in range(self._space.num_ranks)}
        if len(kinds) > 1 and num_stages != 1:
            yield "reversed"

    def _choices(self) -> tuple[int, ...]:
        num_ranks = self._space.num_ranks
        if num_ranks <= MAX_RANKS_FOR_ANY_REPLICAS:
            return tuple(range(1, num_ranks + 1))
        per_node = max(node.num_devices for node in self._space.cluster.nodes)
        return tuple(r for r in range(1, num_ranks + 1) if num_ranks % r == 0 or r % per_node == 0)

    def _find(self, search: _Search) -> Iterator[Candidate]:
        self._num_problems += 1
        self._num_configurations += _num_slicings(
            len(self.tables(search.size).graph.layers), search.layout.num_ranks, search.replicas, search.num_stages
        )
        candidate = self._solve(search)
        if candidate is not None:
            yield candidate
        elif search.cutoff_s == math.inf:
            self._num_infeasible += 1

    def _solve(self, search: _Search) -> Candidate | None:
        slicing = solve_slicing(
            self._problem(search), replicas=search.replicas, num_stages=search.num_stages, cutoff_s=search.cutoff_s
        )
        if slicing is None:
            return None
        plan = self._plan(self.tables(search.size), search.schedule, search.layout, slicing.bounds, slicing.replicas)
        return Candidate(plan=plan, estimate_s=slicing.seconds, found_in=search)

    def _problem(self, search: _Search) -> SlicingProblem:
        tables = self.tables(search.size)
        num_layers = len(tables.graph.layers)
        return make_problem(
            tables,
            self._find_places(search.layout, search.replicas),
            in_flight=self._in_flight(tables, search.schedule, search.layout, search.replicas),
            beside=self._beside.setdefault(search, np.zeros((num_layers, num_layers + 1))),
            exchange=self._space.exchange,
            workload=self._space.workload,
            cost=self._space.cost,
            offload=self._space.offload,
        )

    def next_best(self, candidate: Candidate, peak_bytes: Sequence[int]) -> Candidate | None:
        """The next plan of the same problem, after a candidate whose ranks need more than they have; None if none is.

        Until then its stages stand at lower bounds (`stage_bytes`). What a walk finds is put there for all problems of
        the size, what its simulation shows on top (transfers under way) for this problem.
        """
        search, plan = candidate.found_in, candidate.plan
        tables, problem = self.tables(search.size), self._problem(search)
        before = 0
        for stage, cut in zip(plan.stages, slice_graph(tables.graph, plan.bounds), strict=True):
            settle_stage(
                tables, cut, (stage.start, stage.stop), len(stage.ranks), self._space.workload, self._space.cost
            )
            known = memory_of(problem, stage.start, stage.stop, before, len(stage.ranks))
            shown = max(peak_bytes[rank] for rank in stage.ranks)
            if shown > problem.memory_limit[before, len(stage.ranks)]:
                self._beside[search][stage.start, stage.stop] += max(shown - known, 0.0)
            before += len(stage.ranks)
        return self._solve(search)

    def _in_flight(self, tables: Tables, schedule: str, layout: Layout, replicas: tuple[int, ...]) -> Integers:
        """What the schedule keeps; that of an own one is counted where the shape is known before the slicing."""
        known = assume_in_flight(schedule, tables.num_microbatches, layout.num_ranks, self._space.workload.kind)
        if schedule in SCHEDULES or self._space.workload.kind == "inference" or len(replicas) > 1:
            return known
        (take,), num_layers = replicas, len(tables.graph.layers)
        num_stages = layout.num_ranks // take
        if num_stages > num_layers or take > tables.num_microbatches:
            return known
        edges = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
        even = self._plan(tables, schedule, layout, tuple(pairwise(edges)), (take,) * num_stages)
        # An error is found again, and reported, when the plan itself is simulated.
        with suppress(ScheduleError):
            for stage in range(num_stages):
                known[stage * take, take] = max_in_flight(even, stage)
        return known

    def _find_places(self, layout: Layout, replicas: tuple[int, ...]) -> Places:
        key = layout, replicas
        if key not in self._places:
            self._places[key] = find_places(
                layout,
                self._space.cluster,
                self._space.cost,
                replicas=replicas,
                bucket_bytes=self._space.exchange.bucket_bytes,
                memory_limit_bytes=self._space.memory_limit_bytes,
            )
        return self._places[key]

    def _plan(
        self, tables: Tables, schedule: str, layout: Layout, bounds: Sequence[tuple[int, int]], replicas: Sequence[int]
    ) -> Plan:
        return Plan(
            model=self._space.model,
            model_sizes=self._space.model_sizes,
            graph_hash=tables.graph.content_hash,
            cluster=self._space.cluster.name,
            workload=self._space.workload,
            stages=layout.stages(bounds, replicas),
            num_microbatches=tables.num_microbatches,
            schedule=schedule,
            schedule_hash=self._space.schedule_hashes.get(schedule, ""),
            exchange=self._space.exchange,
            offload=self._space.offload,
        )


def _num_slicings(num_layers: int, num_ranks: int, replicas: tuple[int, ...], num_stages: int | None) -> int:
    """Ways to cut the layers into stages and to share the ranks among them."""
    stages = [num_stages] if num_stages else range(1, min(num_layers, num_ranks) + 1)
    if len(replicas) == 1:
        return sum(math.comb(num_layers - 1, s - 1) for s in stages if s * replicas[0] == num_ranks)
    return sum(math.comb(num_layers - 1, s - 1) * math.comb(num_ranks - 1, s - 1) for s in stages)
