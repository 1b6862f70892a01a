"""PipeDream's planner as a search method (`pipedream`), and for profiles of layers (`plan_profile`).

A plan's stages are ranges of a graph's layers, so the search method considers only states along the graph's order of
layers. For each microbatch size (PipeDream's minibatch), it solves the dynamic program for all combinations of

    machines    on two levels, devices and nodes; or all devices on one level with the slowest link
    transfers   that take their time; or free
    replicas    any numbers (asynchronous schedules: divisors of the number of minibatches); or 1 everywhere (a straight
                pipeline)

It also proposes data parallelism, PipeDream's baseline. Under asynchronous schedules, gradients are reduced for every
minibatch, as in PipeDream, and a step of M minibatches takes M times the slowest stage. Under synchronous schedules,
gradients are reduced once per step, so parameters count 1 / M, and the time of the first minibatch in the other stages
is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.methods.pipedream.profile_states import (
    Profile,
    ProfileStates,
    find_states,
    make_profile,
    states_along,
)
from meshwright.planner.methods.pipedream.recurrence import Level, PipeDreamOptions, data_parallel_seconds, solve_levels
from meshwright.planner.problem import Problem, divisors
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.planner.space import Space
from meshwright.program import build_program
from meshwright.spec import (
    DeadlockError,
    NoFeasiblePlanError,
    Plan,
    PlanError,
    ScheduleError,
    StagePlan,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)
from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES


# For graphs with too many states. An order passes through one state per layer. Few bytes are on the frontier if
# branches are finished one after the other. So besides the order of the profile itself, one order continues with the
# layer that became ready last, and one with the layer that leaves the least to keep.
def find_orders(profile: Profile) -> Iterator[list[int]]:
    """Yield up to three orders of the layers (lists of indexes) in which each layer comes after those that it reads.

    Each starts with the first layer of the profile.
    """
    yield list(range(len(profile.names)))
    yield _walk(profile, by_bytes=False)
    yield _walk(profile, by_bytes=True)


def _walk(profile: Profile, *, by_bytes: bool) -> list[int]:
    """Return an order that continues with the layer that became ready last or, by bytes, adds the least to keep."""
    readers = profile.readers
    missing = [len(sources) for sources in profile.reads]
    unread = [len(items) for items in readers]
    # The step since which a layer is ready; another source is started only if nothing else is ready.
    ready = {layer: -1 for layer, count in enumerate(missing) if count == 0}
    order: list[int] = []

    def preference(layer: int) -> tuple[float, int, int]:
        freed = sum(float(profile.activation_bytes[source]) for source in profile.reads[layer] if unread[source] == 1)
        return (float(profile.activation_bytes[layer]) - freed if by_bytes else 0.0, -ready[layer], layer)

    while ready:
        layer = 0 if not order else min(ready, key=preference)
        del ready[layer]
        order.append(layer)
        for source in profile.reads[layer]:
            unread[source] -= 1
        for reader in readers[layer]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready[reader] = len(order)
    return order


def count_states(profile: Profile) -> int:
    """Return an upper bound of the number of states of a profile.

    It is the number of sets of layers that include the first layer and, with each layer, all layers that it reads.
    """
    readers = profile.readers
    unread = [len(items) for items in readers]
    counts = {frozenset[int](): 1}
    for layer in list(find_orders(profile))[1]:
        grown: dict[frozenset[int], int] = {}
        done = {source for source in profile.reads[layer] if unread[source] == 1}
        for source in profile.reads[layer]:
            unread[source] -= 1
        for members, count in counts.items():
            choices = [members] if layer else []
            if members.issuperset(profile.reads[layer]):
                choices.append(members | {layer} if readers[layer] else members)
            for chosen in choices:
                kept = chosen - done
                grown[kept] = grown.get(kept, 0) + count
        counts = grown
    return sum(counts.values())


# With more states, some are taken from orders of the layers. Finding this number takes about 0.2 s.
MAX_STATES = 20_000
DEFAULT_OPTIONS = PipeDreamOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipedreamStage:
    """One stage of a PipeDream plan; all values are for one minibatch.

    ``layers`` are indexes of the profile, ascending. ``replicas`` has the number of replicas on each level of machines,
    the lowest level first. ``compute_s`` is the time of the layers on one device. ``seconds`` is the time per minibatch
    with all replicas, including the gradient reductions of all levels. ``received_bytes`` are the activations that the
    stage receives.
    """

    layers: tuple[int, ...]
    replicas: tuple[int, ...]
    compute_s: float
    seconds: float
    parameter_bytes: float
    received_bytes: float

    @property
    def num_machines(self) -> int:
        """The number of devices that hold the stage: the product of ``replicas``."""
        return math.prod(self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipedreamPlan:
    """The result of PipeDream's planner: stages in the order of the pipeline, and estimates in seconds per minibatch.

    ``bottleneck_s``: the slowest stage, which is minimised. ``bound_s``: a lower bound of it for all plans of the
    profile. ``single_s``: the model on one machine. ``data_parallel_s``: replicas of the model on all machines. If
    ``is_complete``, the plan is the best of all; else, it is the best that cuts at the ``num_states`` states
    considered.
    """

    profile: Profile
    levels: tuple[Level, ...]
    options: PipeDreamOptions
    stages: tuple[PipedreamStage, ...]
    bottleneck_s: float
    bound_s: float
    single_s: float
    data_parallel_s: float
    num_states: int
    is_complete: bool

    @property
    def speedup(self) -> float:
        """How many times faster the plan is than one machine, by PipeDream's estimate."""
        return self.single_s / self.bottleneck_s

    @property
    def speedup_over_data_parallel(self) -> float:
        """How many times faster the plan is than replicas of the whole model on all machines."""
        return self.data_parallel_s / self.bottleneck_s

    @property
    def num_machines(self) -> int:
        """The number of machines that the plan uses."""
        return sum(stage.num_machines for stage in self.stages)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per stage.

        Keys: ``stage`` (index), ``layers`` (their number), ``first`` and ``last`` (names of layers), ``machines``,
        ``replicas``, ``compute_s``, ``seconds``, ``parameter_bytes``, ``received_bytes``; see `PipedreamStage`.
        """
        return [
            {
                "stage": index,
                "layers": len(stage.layers),
                "first": self.profile.names[stage.layers[0]],
                "last": self.profile.names[stage.layers[-1]],
                "machines": stage.num_machines,
                "replicas": list(stage.replicas),
                "compute_s": stage.compute_s,
                "seconds": stage.seconds,
                "parameter_bytes": stage.parameter_bytes,
                "received_bytes": stage.received_bytes,
            }
            for index, stage in enumerate(self.stages)
        ]

    def explain(self) -> str:
        """Return printable lines: the bottleneck, comparisons, whether the plan is optimal, and the stages."""
        machines = math.prod(level.num_machines for level in self.levels)
        lines = [
            f"{format_count(len(self.stages), 'stage')} on {self.num_machines} of {format_count(machines, 'machine')}: "
            + "-".join(str(stage.num_machines) for stage in self.stages),
            f"{format_seconds(self.bottleneck_s)} per minibatch in the slowest stage: {self.speedup:.2f} times one "
            f"machine, {self.speedup_over_data_parallel:.2f} times data parallelism "
            f"({format_seconds(self.data_parallel_s)})",
        ]
        gap = format_percent(self.bottleneck_s / self.bound_s - 1) if self.bound_s else "0 %"
        if self.is_complete:
            lines.append(f"the best of all possible cuts ({format_count(self.num_states, 'state')} of the graph)")
        else:
            lines.append(
                f"the best of the cuts at {format_count(self.num_states, 'state')} along some orders of the layers, as "
                f"all states are too many; no plan is faster than {format_seconds(self.bound_s)} (no transfers), so at "
                f"most {gap} are lost"
            )
        lines += [
            f"  {row['stage']}: {row['first']} to {row['last']} ({format_count(row['layers'], 'layer')}) on "
            f"{row['machines']}, {format_seconds(row['seconds'])}, {format_bytes(row['parameter_bytes'])} of weights, "
            f"{format_bytes(row['received_bytes'])} received"
            for row in self.rows()
        ]
        return "\n".join(lines)


def plan_profile(
    profile: Profile,
    levels: Sequence[Level],
    options: PipeDreamOptions = DEFAULT_OPTIONS,
    *,
    max_states: int = MAX_STATES,
) -> PipedreamPlan:
    """Return PipeDream's plan of a profile for machines on ``levels``, the lowest first (devices of a host, hosts).

    With more than ``max_states`` states, only those along some orders of the layers are considered. Raises PlanError
    for invalid levels or options, NoFeasiblePlanError if no plan satisfies the options.
    """
    _check(levels, options)
    states = find_states(profile, max_states) or states_along(profile, find_orders(profile))
    return plan_states(profile, states, levels, options)


def plan_states(
    profile: Profile, states: ProfileStates, levels: Sequence[Level], options: PipeDreamOptions
) -> PipedreamPlan:
    """Return the best plan that cuts a profile only at the given states.

    Raises NoFeasiblePlanError if no plan satisfies the options.
    """
    solution = solve_levels(states, levels, options)
    if solution is None:
        raise _nothing_fits(profile, states, levels, options)
    inside = [set[int](), *(states.layers(cut.stop) for cut in solution.cuts)]
    stages = tuple(
        PipedreamStage(
            layers=tuple(sorted(after - before)),
            replicas=cut.replicas,
            compute_s=_between(states.seconds, cut.start, cut.stop),
            seconds=_stage_seconds(states, cut.start, cut.stop, cut.replicas, levels),
            parameter_bytes=_between(states.parameter_bytes, cut.start, cut.stop),
            received_bytes=float(states.frontier_bytes[cut.start]) if cut.start >= 0 else 0.0,
        )
        for cut, (before, after) in zip(solution.cuts, pairwise(inside), strict=True)
    )
    single_s = float(states.seconds[-1])
    return PipedreamPlan(
        profile=profile,
        levels=tuple(levels),
        options=options,
        stages=stages,
        bottleneck_s=solution.bottleneck_s,
        bound_s=single_s / math.prod(level.num_machines for level in levels),
        single_s=single_s,
        data_parallel_s=data_parallel_seconds(single_s, float(states.parameter_bytes[-1]), levels),
        num_states=len(states),
        is_complete=states.complete,
    )


def _between(sums: Any, start: int, stop: int) -> float:
    return float(sums[stop] - (sums[start] if start >= 0 else 0.0))


def _stage_seconds(
    states: ProfileStates, start: int, stop: int, replicas: Sequence[int], levels: Sequence[Level]
) -> float:
    taken = [
        Level(num_machines=count, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s)
        for count, level in zip(replicas, levels, strict=True)
    ]
    weights = _between(states.parameter_bytes, start, stop)
    return data_parallel_seconds(_between(states.seconds, start, stop), weights, taken)


def _check(levels: Sequence[Level], options: PipeDreamOptions) -> None:
    if not levels:
        raise PlanError("No levels of machines were given; expected at least one, with its machines and bandwidth.")
    for level in levels:
        if level.num_machines < 1 or not 0 < level.bandwidth_bytes_per_s < math.inf:
            raise PlanError(
                f"A level of {level.num_machines} machines with {level.bandwidth_bytes_per_s:g} B/s was given; "
                "expected at least one machine and a finite bandwidth above 0."
            )
    if options.replicas is not None and min(options.replicas, default=0) < 1:
        raise PlanError(f"replicas={list(options.replicas)} was given; expected numbers of replicas of at least 1.")
    for name, value in (("compression ratio", options.compression_ratio), ("memory limit", options.memory_bytes)):
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"A {name} of {value:g} was given; expected a finite number above 0, or None for none.")


def _nothing_fits(
    profile: Profile, states: ProfileStates, levels: Sequence[Level], options: PipeDreamOptions
) -> NoFeasiblePlanError:
    machines = math.prod(level.num_machines for level in levels)
    given = f"{format_count(len(profile.names), 'layer')} on {format_count(machines, 'machine')}"
    if options.memory_bytes is not None:
        kept = float(states.activation_bytes[-1] + states.parameter_bytes[-1])
        return NoFeasiblePlanError(
            f"No plan of {given} fits into {format_bytes(options.memory_bytes)} per machine, by PipeDream's count: "
            f"activations and weights ({format_bytes(kept)} in all) are kept for each minibatch in flight. Raise the "
            "limit, or use fewer machines."
        )
    return NoFeasiblePlanError(
        f"No pipeline of {given} uses all machines with stages of {list(options.replicas or ())} replicas. Allow other "
        "numbers of replicas, or idle machines (fewer_machines=True), or give fewer machines."
    )


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
    """Propose PipeDream's plans, the best by its own estimate first, until enough of them fit into memory.

    Raises PlanError if no plan has an allowed number of stages; PipeDream chooses this number itself.
    """
    found = [item for space in problem.spaces() for item in _search(space, state)]
    if not found:
        raise PlanError(
            f"The method pipedream chooses the number of stages itself and finds no plan with "
            f"{list(problem.choices.num_stages)} stages for these "
            "devices and microbatches. Leave --stages out, or use another method."
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
    """Return the stages of a plan on ranks, in the order of the pipeline.

    With two levels of machines, a stage gets the same devices of each of its nodes, and its replicas are numbered so
    that a microbatch stays in one node.
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
