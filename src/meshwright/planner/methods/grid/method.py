"""The method: bound every uniform configuration, then simulate from the lowest bound up until none is below the best.

What is simulated last proves the answer: every configuration that was not simulated has a lower bound at or above the
best step. Where the time is over before, the lowest bound that is left says how far the best may be from the optimum
among uniform configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from meshwright.planner.choices import Setting
from meshwright.planner.layouts import Layout, LayoutName
from meshwright.planner.method import Proposal, SearchState, Steps
from meshwright.planner.methods.grid.sheet import Configuration, bound_grid
from meshwright.planner.problem import Problem
from meshwright.spec import Plan, StagePlan, format_count, format_percent, format_seconds
from meshwright.spec.exchange import ZeroStage

# Plans with less than this above a bound are as good as it: prices are worth less.
_CLOSE = 1e-4


def grid(problem: Problem, state: SearchState) -> Steps:
    """Enumerate, bound, and simulate what may still be the best."""
    found = bound_grid(problem)
    num_fitting = found.num_fitting
    state.count(considered=found.num_configurations, pruned=found.num_configurations - num_fitting)
    best_s, looked_at, left_s = math.inf, 0, math.inf
    for bound_s, configuration in found.by_bound():
        if bound_s >= best_s * (1 - _CLOSE) or (looked_at and state.seconds_left() <= 0):
            left_s = bound_s
            break
        state.events.progress("simulate the grid", looked_at, looked_at + 1)
        for plan in plans_of(problem, configuration):
            looked_at += 1
            result = yield Proposal(plan, bound_s)
            if result is not None and result.fits:
                best_s = min(best_s, result.step_time_s)
    state.note(_summary(found.num_configurations, num_fitting, looked_at, min(left_s, best_s), best_s))


def plans_of(problem: Problem, configuration: Configuration) -> Iterator[Plan]:
    """The plans of a configuration: one for each layout of its ranks, and each way to offload."""
    wanted, positions = configuration, configuration.positions
    num_devices = wanted.num_ranks * wanted.sharding.width
    for away in problem.choices.offload:
        zero = cast("ZeroStage", wanted.zero)
        setting = Setting(num_devices, wanted.sharding, zero, wanted.recompute, away, wanted.shard_size, wanted.idle)
        space = problem.space(setting)
        replicas, alike = space.num_ranks // positions, len(space.cluster.device_kinds) == 1
        several = len(space.cluster.nodes) > 1 and positions > 1 and replicas > 1 and alike
        names: tuple[LayoutName, ...] = ("stage-major", "replica-major") if several else ("stage-major",)
        for name in names:
            layout = Layout(name=name, num_ranks=space.num_ranks, num_stages=positions)
            ranks = [layout.ranks(position * replicas, replicas) for position in range(positions)] * wanted.chunks
            stages = tuple(
                StagePlan(start=start, stop=stop, ranks=own)
                for (start, stop), own in zip(wanted.bounds, ranks, strict=True)
            )
            yield space.whole(space.make_plan(stages, wanted.microbatch_size, wanted.schedule))


def _summary(num_rows: int, num_fitting: int, num_simulated: int, bound_s: float, best_s: float) -> str:
    text = (
        f"Uniform grid: {format_count(num_rows, 'configuration')} bounded, of which {num_fitting:,} may fit; "
        f"{format_count(num_simulated, 'plan')} simulated."
    )
    if best_s == math.inf:
        return text
    if bound_s >= best_s * (1 - _CLOSE):
        return f"{text} No other uniform configuration is faster than the best of them."
    return (
        f"{text} No uniform configuration takes less than {format_seconds(bound_s)}; the best of them takes "
        f"{format_percent(best_s / bound_s - 1)} more."
    )
