"""The method `unequal`, for unequal devices: simulate the best mappings, then make small changes of the best plans.

For every microbatch size and schedule, several mapping problems are solved: with groups of any number of devices, and
with groups of exactly R devices for every R that divides the number of devices. This yields varied plans, because the
closed form ignores some effects that the simulator includes. If all devices are equal, the method proposes nothing:
`slicing` covers this case.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, islice, permutations, product

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.climbing import Stages, as_chain, climb, moved_boundaries
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.methods.slicing.slicing_method import LEAST_SIMULATED, choose
from meshwright.planner.methods.unequal.mapping import MAX_ENTRIES, Mapping, num_entries, solve_mapping
from meshwright.planner.methods.unequal.virtual_workers import (
    DeviceClasses,
    are_equal,
    find_devices,
    form_workers,
    make_mapping_problem,
    plan_mapping,
    plan_workers,
    share_stage,
)
from meshwright.planner.problem import Problem, divisors
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.planner.space import Space
from meshwright.planner.stage_tables import settle_stage
from meshwright.spec import Plan, PlanError, slice_graph
from meshwright.spec.exchange import WAVES
from meshwright.spec.schedules import BASIC_SCHEDULES


# A local search on the simulator tries:
#
#     order      two neighbouring stages swap places and keep their numbers of layers; or all stages are reversed
#     boundary   a layer goes to the stage before or behind (`climbing`)
#     swap       two unlike devices of different stages change places
#     share      a microbatch goes from one replica of a stage to an unlike one
#
# If devices change places or layers move, the microbatches of the changed stages are divided again.
def neighbours(space: Space, plan: Plan) -> Iterator[Plan]:
    """Yield plans that differ from ``plan`` by one small change."""
    plan = replace(plan, stages=as_chain(plan.stages))
    changed = (*_reordered(plan.stages), *moved_boundaries(plan.stages), *_swapped_devices(space, plan.stages))
    for stages in changed:
        yield replace(plan, stages=_shared_anew(space, plan, stages))
    for stages in _moved_shares(space, plan):
        yield replace(plan, stages=stages)


def _reordered(stages: Stages) -> Iterator[Stages]:
    if len(stages) > 2:
        yield _in_a_row(stages[::-1])
    for index in range(1, len(stages)):
        yield _in_a_row((*stages[: index - 1], stages[index], stages[index - 1], *stages[index + 1 :]))


def _in_a_row(stages: Stages) -> Stages:
    """Return the stages in this order, each with its former number of layers."""
    stops = accumulate(stage.stop - stage.start for stage in stages)
    return tuple(
        replace(stage, start=stop - (stage.stop - stage.start), stop=stop)
        for stage, stop in zip(stages, stops, strict=True)
    )


def _swapped_devices(space: Space, stages: Stages) -> Iterator[Stages]:
    """One swap for each two stages and each two unlike classes of devices in them."""
    columns = space.cluster.columns()
    for first, second in combinations(range(len(stages)), 2):
        tried: set[tuple[tuple[int, int], tuple[int, int]]] = set()
        for a in stages[first].ranks:
            for b in stages[second].ranks:
                kinds = [(int(columns.node[rank]), int(columns.kind[rank])) for rank in (a, b)]
                if kinds[0] == kinds[1] or (kinds[0], kinds[1]) in tried:
                    continue
                tried.add((kinds[0], kinds[1]))
                changed = {a: b, b: a}
                yield tuple(
                    replace(stage, ranks=tuple(changed.get(rank, rank) for rank in stage.ranks)) for stage in stages
                )


def _moved_shares(space: Space, plan: Plan) -> Iterator[Stages]:
    """One microbatch for each stage and each two kinds of devices in it: from who has most to who has least."""
    for index, stage in enumerate(plan.stages):
        counts = stage.counts(plan.num_microbatches)
        members: dict[str, list[int]] = {}
        for replica, rank in enumerate(stage.ranks):
            members.setdefault(space.cluster.device_kind(rank).name, []).append(replica)
        for giving, taking in permutations(members.values(), 2):
            giver, taker = max(giving, key=lambda k: counts[k]), min(taking, key=lambda k: counts[k])
            if counts[giver] > 1:
                shares = tuple(count - (k == giver) + (k == taker) for k, count in enumerate(counts))
                yield (*plan.stages[:index], replace(stage, shares=shares), *plan.stages[index + 1 :])


def _shared_anew(space: Space, plan: Plan, stages: Stages) -> Stages:
    """The stages with the best shares by speed, where they changed."""
    return tuple(
        stage
        if stage in plan.stages
        else replace(stage, shares=share_stage(space, plan.microbatch_size, (stage.start, stage.stop), stage.ranks))
        for stage in stages
    )


# Mappings up to this multiple of the least estimate are simulated: the closed form misses waiting between unequal
# stages, and cards that several devices share.
SLACK = 1.3
# Mappings that are simulated for every plan that was asked for, and at least.
PLANS_PER_ANSWER, LEAST_PLANS = 3, 12
# Simulations of mappings that need too much memory, one after the other, and of changes of the best plan.
MAX_REPAIRS = 8
MAX_MOVES = 60
# Plans from which changes begin: the fastest of each shape (devices per stage), at most this number.
NUM_STARTS = 4


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """A mapping, where it was found, and what simulations showed in addition to the bytes of stages."""

    space: Space
    devices: DeviceClasses
    size: int
    schedule: str
    mapping: Mapping
    beside: NDArray[np.float64]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, its number of devices of each class."""
        return tuple(self.devices.groups[group] for group in self.mapping.groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """The entries of ``groups`` in one tuple."""
        return tuple(count for group in self.groups for count in group)


def unequal(problem: Problem, state: SearchState) -> Steps:
    """Propose mappings of stages to unequal devices, then small changes of the best plans.

    Replicas get microbatches in proportion to their speed. Proposes nothing if all devices are equal.
    """
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
