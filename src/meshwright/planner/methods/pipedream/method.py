"""PipeDream's planner as a search method: its stages as plans, which the simulator estimates.

A plan's stages are ranges of a graph's layers, so only the graph's states along its order of layers are considered. For
each microbatch size (PipeDream's minibatch), the dynamic program runs

    with machines on two levels, devices and nodes, and with all devices behind the slowest link
    with transfers that take their time, and with free transfers
    with all numbers of replicas that can divide the minibatches, and for a straight pipeline

and data parallelism, PipeDream's baseline, is proposed too. Under asynchronous schedules, gradients are reduced for
every minibatch, as in PipeDream, and a step of M minibatches takes M times the slowest stage. In synchronous ones they
are reduced once per step, so that parameters weigh an M-th of that, and the first minibatch's way through the other
stages is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.method import Proposal, SearchState, Steps
from meshwright.planner.methods.pipedream.levels import Level, PipeDreamOptions
from meshwright.planner.methods.pipedream.planning import PipedreamPlan, PipedreamStage, plan_states
from meshwright.planner.methods.pipedream.profile import Profile, make_profile
from meshwright.planner.methods.pipedream.states import states_along
from meshwright.planner.microbatches import divisors
from meshwright.planner.problem import Problem
from meshwright.planner.space import Space
from meshwright.program import build_program
from meshwright.spec import DeadlockError, NoFeasiblePlanError, Plan, PlanError, ScheduleError, StagePlan
from meshwright.spec.plan import ASYNCHRONOUS_SCHEDULES

# The message size at which a link's bandwidth is taken.
_MESSAGE_BYTES = float(64 << 20)
# The largest cluster that is also solved on one level; the dynamic program grows with the square of devices.
MAX_FLAT = 64


class _Found(NamedTuple):
    """Stages of a space on ranks, their schedules, and PipeDream's seconds of a step."""

    space: Space
    size: int
    stages: tuple[StagePlan, ...]
    schedules: tuple[str, ...]
    seconds: float


def pipedream(problem: Problem, state: SearchState) -> Steps:
    """Propose what PipeDream finds, best by its own estimate first, until enough plans fit.

    Raises PlanError if it finds no plan with an allowed number of stages; it chooses the number itself.
    """
    found = [item for space in problem.spaces() for item in _search(space, state)]
    if not found:
        raise PlanError(
            f"PipeDream's planner chooses stages itself, and finds no plan of "
            f"{list(problem.choices.num_stages)} stages for these "
            "devices and microbatches. Leave the number of stages open, or use another method."
        )
    seen: set[Plan] = set()
    num_fitting = 0
    for item in sorted(found, key=lambda item: item.seconds):
        for schedule in item.schedules:
            plan = _make_plan(item, schedule, state)
            if plan is None or plan in seen:
                continue
            seen.add(plan)
            result = yield Proposal(plan, item.seconds)
            num_fitting += result is not None and result.fits
        if num_fitting >= state.max_plans or (num_fitting and state.seconds_left() <= 0):
            return


def _search(space: Space, state: SearchState) -> Iterator[_Found]:
    """Yield what the dynamic program finds in one space."""
    endless = tuple(name for name in space.schedules if name in ASYNCHRONOUS_SCHEDULES)
    flushed = tuple(name for name in space.schedules if name not in ASYNCHRONOUS_SCHEDULES)
    for size in space.microbatch_sizes:
        if state.seconds_left() <= 0 and state.best is not None:
            return
        profile = _profile(space, size)
        state.count(considered=math.comb(len(profile.names) + space.num_ranks - 2, space.num_ranks - 1))
        if endless:
            yield from _solve(space, size, profile, endless)
        if flushed:
            weights = profile.parameter_bytes / (space.workload.global_batch // size)
            yield from _solve(space, size, replace(profile, parameter_bytes=weights), flushed)


def _solve(space: Space, size: int, weighed: Profile, schedules: tuple[str, ...]) -> Iterator[_Found]:
    num_microbatches = space.workload.global_batch // size
    never_flushes = schedules[0] in ASYNCHRONOUS_SCHEDULES
    states = states_along(weighed, [range(len(weighed.names))])
    # In inference, nothing is sent back.
    ratio = 2.0 if space.workload.kind == "inference" else 1.0
    some = divisors(num_microbatches) if never_flushes else range(1, num_microbatches + 1)
    for levels, ratio_or_none, replicas in product(_levels(space), (ratio, None), (tuple(some), (1,))):
        options = PipeDreamOptions(compression_ratio=ratio_or_none, replicas=replicas)
        try:
            plan = plan_states(weighed, states, levels, options)
        except NoFeasiblePlanError:
            continue
        fill_s = 0.0 if never_flushes else _fill_seconds(plan)
        everywhere = (StagePlan(start=0, stop=len(weighed.names), ranks=tuple(range(space.num_ranks))),)
        for stages, seconds in (place_stages(plan), plan.bottleneck_s), (everywhere, plan.data_parallel_s):
            shared = all(len(stage.ranks) in some for stage in stages)
            if shared and (not space.num_stages or len(stages) in space.num_stages):
                filling = fill_s if len(stages) > 1 else 0.0
                yield _Found(space, size, stages, schedules, num_microbatches * seconds + filling)


def _fill_seconds(plan: PipedreamPlan) -> float:
    """Return the seconds of a synchronous pipeline besides its longest stage: the way through all others."""
    return plan.single_s - max(stage.compute_s for stage in plan.stages)


def _profile(space: Space, size: int) -> Profile:
    """Return the profile on the slowest device kind: PipeDream's machines are all equal."""
    graph = space.graph_for(size)
    kinds = {kind.name: kind for kind in (space.cluster.device_kind(rank) for rank in range(space.num_ranks))}
    profiles = [make_profile(graph, size, space.cost, kind) for kind in kinds.values()]
    return max(profiles, key=lambda profile: float(profile.seconds.sum()))


def _levels(space: Space) -> Iterator[tuple[Level, ...]]:
    """Yield the ranks as machines: nodes with devices, if nodes are equal; and all of them on one level."""
    num_ranks = space.num_ranks
    each = [space.cluster.node_index(rank) for rank in range(num_ranks)].count(0)
    inside = Level(num_machines=each, bandwidth_bytes_per_s=_bandwidth(space, 0, 1) if each > 1 else math.inf)
    if each == num_ranks:
        yield (inside,)
        return
    nodes = [space.cluster.node_index(rank) for rank in range(num_ranks)]
    between = _bandwidth(space, 0, each)
    if nodes == [rank // each for rank in range(num_ranks)] and num_ranks % each == 0 and each > 1:
        yield inside, Level(num_machines=num_ranks // each, bandwidth_bytes_per_s=between)
        if num_ranks > MAX_FLAT:
            return
    yield (Level(num_machines=num_ranks, bandwidth_bytes_per_s=between),)


def _bandwidth(space: Space, first: int, second: int) -> float:
    seconds = space.cost.collective_seconds("send", (first, second), _MESSAGE_BYTES)
    return _MESSAGE_BYTES / seconds if seconds else math.inf


def place_stages(plan: PipedreamPlan) -> tuple[StagePlan, ...]:
    """Return the stages on ranks in order; on two levels, on the same devices of all nodes of the outer stage.

    There, replicas on the same device of other nodes follow each other: a microbatch then stays in its node.
    """
    each = plan.levels[0].num_machines
    stages: list[StagePlan] = []
    node = device = 0
    for stage in plan.stages:
        inner, outer = (*stage.replicas, 1)[:2]
        ranks = [(node + k) * each + device + place for place, k in product(range(inner), range(outer))]
        # Whole nodes are taken in order: they contain no other stage.
        stages.append(_on_ranks(stage, sorted(ranks) if inner == each else ranks))
        device += inner
        if device == each:
            node, device = node + outer, 0
    return tuple(stages)


def _on_ranks(stage: PipedreamStage, ranks: Sequence[int]) -> StagePlan:
    return StagePlan(start=stage.layers[0], stop=stage.layers[-1] + 1, ranks=tuple(ranks))


def _make_plan(found: _Found, schedule: str, state: SearchState) -> Plan | None:
    """Return the stages under a schedule as a plan of the whole graph; None, and noted, if they cannot follow it."""
    space, problem = found.space, found.space.problem
    graph = space.graph_for(found.size)
    plan = space.make_plan(found.stages, found.size, "1f1b")
    try:
        adopted = adopt_schedule(plan, schedule, graph, space.cost, num_chunks=problem.choices.num_chunks[0])
        local = replace(adopted, exchange=space.exchange.suited_to(schedule))
        if local.is_asynchronous:
            # Building the program reveals what such a schedule refuses, for example tied parameters.
            build_program(local, graph)
        return space.whole(local)
    except (PlanError, ScheduleError, DeadlockError) as error:
        state.refused.append((plan, error))
        return None
