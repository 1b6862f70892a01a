"""The method: the best mappings of every microbatch size and schedule, simulated; then small changes of the best plan.

For every microbatch size and schedule several problems are solved: with all groups of devices, and with those of R
devices alone, for every R that divides their number; the closed form does not see everything that the simulator does.
On devices that are all equal it proposes nothing: exact slicing has all orders of equal devices already.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.climbing import climb
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.method import Proposal, SearchState, Steps
from meshwright.planner.methods.slicing.method import LEAST_SIMULATED, choose
from meshwright.planner.methods.unequal.assemble import (
    DeviceClasses,
    are_equal,
    find_devices,
    make_mapping_problem,
    plan_mapping,
)
from meshwright.planner.methods.unequal.mapping import MAX_ENTRIES, Mapping, num_entries, solve_mapping
from meshwright.planner.methods.unequal.moves import neighbours
from meshwright.planner.methods.unequal.virtual_workers import form_workers, plan_workers
from meshwright.planner.microbatches import divisors
from meshwright.planner.problem import Problem
from meshwright.planner.space import Space
from meshwright.planner.stage_tables import settle_stage
from meshwright.spec import Plan, PlanError, slice_graph
from meshwright.spec.exchange import WAVES
from meshwright.spec.plan import BASIC_SCHEDULES

# Mappings up to this multiple of the least estimate are simulated: the closed form misses waiting between unequal
# stages, and cards that several devices share.
SLACK = 1.3
# Mappings that are simulated for every plan that was asked for, and at least.
PLANS_PER_ANSWER, LEAST_PLANS = 3, 12
# Simulations of mappings that need too much memory, one after the other, and of changes of the best plan.
MAX_REPAIRS = 8
MAX_MOVES = 60
# Plans from which changes begin: the fastest of each shape (devices per stage), so many of them.
NUM_STARTS = 4


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """A mapping, where it was found, and what simulations showed beside the bytes of stages."""

    space: Space
    devices: DeviceClasses
    size: int
    schedule: str
    mapping: Mapping
    beside: NDArray[np.float64]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each class, stage by stage."""
        return tuple(self.devices.groups[group] for group in self.mapping.groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """The same in one row."""
        return tuple(count for group in self.groups for count in group)


def unequal(problem: Problem, state: SearchState) -> Steps:
    """Propose mappings of stages to unequal devices with shares by speed, then changes of the best plan."""
    candidates = sorted(_candidates(problem, state), key=lambda item: item.mapping.seconds)
    found: list[tuple[RankedPlan, Space]] = []
    wanted = max(PLANS_PER_ANSWER * max(state.max_plans, LEAST_SIMULATED), LEAST_PLANS)
    least_s = candidates[0].mapping.seconds if candidates else 0.0
    promising = [item for item in candidates if item.mapping.seconds <= SLACK * least_s]
    for candidate in islice(choose(promising, wanted), wanted):
        if state.seconds_left() <= 0:
            break
        item = yield from _fit(candidate, state)
        if item is not None:
            found.append((item, candidate.space))
    yield from _waves(problem, state)
    starts: dict[tuple[int, ...], tuple[RankedPlan, Space]] = {}
    for item, space in sorted(found, key=lambda pair: pair[0].step_time_s):
        starts.setdefault(tuple(sorted(len(stage.ranks) for stage in item.plan.stages)), (item, space))
    for item, space in list(starts.values())[:NUM_STARTS]:
        yield from climb(item, partial(neighbours, space), state, most=MAX_MOVES)


def _unequal_spaces(problem: Problem) -> Iterator[Space]:
    return (space for space in problem.spaces() if not are_equal(space))


def _candidates(problem: Problem, state: SearchState) -> Iterator[_Candidate]:
    """The best mappings of every space of unequal devices, microbatch size and schedule."""
    schedules = [name for name in problem.choices.schedules if name in BASIC_SCHEDULES]
    least_s = np.inf
    for space in _unequal_spaces(problem):
        devices = find_devices(space)
        for size in space.microbatch_sizes:
            num_layers = len(space.tables(size).graph.layers)
            sizes = [item.size for item in devices.classes]
            if num_entries(num_layers, sizes, len(devices.link_of)) > MAX_ENTRIES:
                continue
            for schedule in schedules[:1] if space.workload.kind == "inference" else schedules:
                if state.seconds_left() <= 0:
                    return
                found = list(_mappings(space, size, schedule, devices, SLACK * least_s))
                least_s = min([least_s, *(item.mapping.seconds for item in found)])
                state.count(considered=len(found))
                yield from {(item.groups, item.mapping.bounds): item for item in reversed(found)}.values()


def _mappings(space: Space, size: int, schedule: str, devices: DeviceClasses, cutoff_s: float) -> Iterator[_Candidate]:
    """The best mapping with all groups, and those with groups of one size each, as far as they are below a cutoff."""
    num_layers = len(space.tables(size).graph.layers)
    for some in (devices, *filter(None, map(devices.of_sizes, divisors(space.num_ranks)))):
        beside = np.zeros((num_layers, num_layers + 1))
        mapping = solve_mapping(make_mapping_problem(space, size, schedule, some, beside), cutoff_s=cutoff_s)
        if mapping is not None:
            yield _Candidate(space=space, devices=some, size=size, schedule=schedule, mapping=mapping, beside=beside)


def _waves(problem: Problem, state: SearchState) -> Steps:
    """Virtual workers of equal distribution, where the schedule of waves is allowed: those of the shortest wave."""
    if WAVES not in problem.choices.schedules or problem.workload.kind == "inference":
        return
    found: list[tuple[float, Plan]] = []
    for space in _unequal_spaces(problem):
        for size, count in product(space.microbatch_sizes, divisors(space.num_ranks)[1:]):
            # Devices that do not divide, layers that do not fit: another number of workers may do.
            with suppress(PlanError):
                workers = form_workers(space, size, "equal", num_workers=count)
                found.append((workers.wave_s, space.whole(plan_workers(space, size, workers))))
                state.count(considered=1)
    for wave_s, plan in sorted(found, key=lambda pair: pair[0])[: state.max_plans]:
        yield Proposal(plan, wave_s)


def _fit(candidate: _Candidate, state: SearchState) -> Generator[Proposal, RankedPlan | None, RankedPlan | None]:
    """Simulate a mapping; where it needs too much memory, the next best one of its problem."""
    space, mapping = candidate.space, candidate.mapping
    for _ in range(MAX_REPAIRS):
        plan = plan_mapping(space, candidate.size, candidate.schedule, candidate.devices, mapping)
        item = yield Proposal(space.whole(plan), mapping.seconds)
        if item is None or item.fits:
            return item
        if item.excess_bytes <= 0 or state.seconds_left() <= 0:
            return None
        tables = space.tables(candidate.size)
        for stage, cut in zip(plan.stages, slice_graph(tables.graph, plan.bounds), strict=True):
            bounds = stage.start, stage.stop
            settle_stage(tables, cut, bounds, len(stage.ranks), space.workload, space.cost)
            over = max(item.reserved_bytes[rank] - item.memory_limit_bytes[rank] for rank in stage.ranks)
            candidate.beside[bounds] += max(over, 0)
        problem = make_mapping_problem(space, candidate.size, candidate.schedule, candidate.devices, candidate.beside)
        found = solve_mapping(problem)
        if found is None:
            return None
        mapping = found
    return None
