"""From a profile and levels of machines to PipeDream's plan, which explains what its optimizer prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.planner.methods.pipedream.levels import Level, PipeDreamOptions, data_parallel_seconds, solve_levels
from meshwright.planner.methods.pipedream.orders import find_orders
from meshwright.planner.methods.pipedream.profile import Profile
from meshwright.planner.methods.pipedream.states import ProfileStates, find_states, states_along
from meshwright.spec import NoFeasiblePlanError, PlanError
from meshwright.spec.units import format_bytes, format_count, format_percent, format_seconds

# With more states, some are taken from orders of the layers. Finding this number takes about 0.2 s.
MAX_STATES = 20_000
DEFAULT_OPTIONS = PipeDreamOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipedreamStage:
    """Some layers (indices of the profile, ascending) on ``num_machines`` devices.

    ``replicas`` are those of each level, the lowest first; ``num_machines`` is their product. ``compute_s`` is the time
    of the layers on one device, ``seconds`` its share with the gradient reductions of all levels, by the formula of
    data parallelism. ``received_bytes`` are on the frontier before the stage.
    """

    layers: tuple[int, ...]
    replicas: tuple[int, ...]
    compute_s: float
    seconds: float
    parameter_bytes: float
    received_bytes: float

    @property
    def num_machines(self) -> int:
        """The number of devices that hold the stage."""
        return math.prod(self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipedreamPlan:
    """Stages in the order of the pipeline, and PipeDream's estimate of them, in seconds per minibatch.

    ``bottleneck_s`` is minimised. ``bound_s`` is a lower bound of all plans of the profile, by this estimate; the plan
    is the best if ``is_complete``, else the best of ``num_states`` states that were considered.
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
        """Speedup over one machine."""
        return self.single_s / self.bottleneck_s

    @property
    def speedup_over_data_parallel(self) -> float:
        """Speedup over replicas of the whole model on all machines."""
        return self.data_parallel_s / self.bottleneck_s

    @property
    def num_machines(self) -> int:
        """The number of devices used."""
        return sum(stage.num_machines for stage in self.stages)

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row per stage, with the names of its first and last layer in the order of the profile."""
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
        """Return the stages, times and comparisons in lines."""
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
            lines.append(f"the best of all cuts ({format_count(self.num_states, 'state')})")
        else:
            lines.append(
                f"the best of {format_count(self.num_states, 'state')} of some orders of the layers; all are too many: "
                f"no plan is faster than {format_seconds(self.bound_s)}, which is the same work without transfers: at "
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
    """Return PipeDream's plan for machines on ``levels``, the lowest first (devices of a host, then hosts).

    Raises PlanError for invalid levels or options, NoFeasiblePlanError if no plan satisfies the options.
    """
    _check(levels, options)
    states = find_states(profile, max_states) or states_along(profile, find_orders(profile))
    return plan_states(profile, states, levels, options)


def plan_states(
    profile: Profile, states: ProfileStates, levels: Sequence[Level], options: PipeDreamOptions
) -> PipedreamPlan:
    """Return the best plan that cuts only at some states of a profile. Raises NoFeasiblePlanError if none exists."""
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
        raise PlanError("No levels of machines were given; expected at least one. Give the machines and their links.")
    for level in levels:
        if level.num_machines < 1 or not 0 < level.bandwidth_bytes_per_s < math.inf:
            raise PlanError(
                f"A level of {level.num_machines} machines with {level.bandwidth_bytes_per_s:g} B/s was given; "
                "expected at least one machine and links that send something."
            )
    if options.replicas is not None and min(options.replicas, default=0) < 1:
        raise PlanError(f"Stages of {list(options.replicas)} replicas were asked for; expected at least 1 of each.")
    for name, value in (("compression ratio", options.compression_ratio), ("limit of memory", options.memory_bytes)):
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"A {name} of {value:g} was given; expected more than 0. Leave it out for none.")


def _nothing_fits(
    profile: Profile, states: ProfileStates, levels: Sequence[Level], options: PipeDreamOptions
) -> NoFeasiblePlanError:
    machines = math.prod(level.num_machines for level in levels)
    given = f"{format_count(len(profile.names), 'layer')} on {format_count(machines, 'machine')}"
    if options.memory_bytes is not None:
        kept = float(states.activation_bytes[-1] + states.parameter_bytes[-1])
        return NoFeasiblePlanError(
            f"No plan of {given} keeps to {format_bytes(options.memory_bytes)} on each machine, as PipeDream counts "
            f"activations and weights ({format_bytes(kept)} in all, stashed for each minibatch in flight). Raise the "
            "limit, or take fewer machines."
        )
    return NoFeasiblePlanError(
        f"No pipeline of {given} uses all of them with stages of {list(options.replicas or ())} replicas. Allow more "
        "numbers of replicas or fewer machines, or take fewer machines."
    )
