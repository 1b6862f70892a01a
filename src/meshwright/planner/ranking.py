"""The order of plans that fit: faster ones first, among equally fast plans those with less memory; one plan per layout.

A plan counts as equally fast as the fastest one if it is at most 1 % slower, or if it is at most 5 % slower and the 80
% interval of the ratio of their steps reaches 1. The interval comes from simulating both plans with all costs at their
low and at their high ends, so that common errors cancel.

    ratio    from min to max of  step / fastest step  by usual, low and high costs

The remaining plans are grouped in the same way, starting from the fastest of them. Equally fast plans are ordered by
reserved memory, in hundredths of the rank's limit; then by the number of mechanisms (pipeline, axes of sharding, ZeRO,
recompute, offload); then by step time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from meshwright.planner.evaluate import RankedPlan, StepInterval
from meshwright.spec import Plan
from meshwright.spec.offload import ON_DEVICE

# Predictions are not more precise than this, however similar two plans are.
LEAST_DIFFERENCE = 0.01
# Upper limit of "as fast", however wide the intervals are: saved memory is not worth more than this.
MOST_DIFFERENCE = 0.05
LEAST_RANKED = 10
# The limit of simulated instructions for intervals, without the first plan; a plan for a large cluster has about
# 100,000, which take about a second.
MAX_INSTRUCTIONS = 600_000


def rank_plans(
    items: Sequence[RankedPlan], max_plans: int, predict_interval: Callable[[Plan], StepInterval] | None
) -> tuple[RankedPlan, ...]:
    """Return the first ``max_plans`` plans in the order of this module.

    Without ``predict_interval``, a plan is equally fast only if it is at most 1 % slower. At least `LEAST_RANKED` plans
    are ordered even if fewer are requested, so that the number of listed plans does not change their order.
    """
    ordered_by_time = sorted(items, key=lambda item: (item.aimed_s, _num_mechanisms(item)))
    left = distinct_layouts(ordered_by_time)[: max(max_plans, LEAST_RANKED)]
    if predict_interval is not None:
        left = _with_intervals(left, predict_interval)
    ordered: list[RankedPlan] = []
    while left:
        # All remaining plans that are as fast as the fastest of them.
        fastest = left[0]
        ordered += sorted((item for item in left if is_as_fast(item, fastest)), key=_burden)
        left = [item for item in left if not is_as_fast(item, fastest)]
    return tuple(ordered[:max_plans])


def distinct_layouts(items: Sequence[RankedPlan]) -> list[RankedPlan]:
    """Return the first plan of each layout (`layout_of`), and only the first of plans that differ in name only.

    Plans differ in name only if they have the same step time and memory, such as one microbatch per rank under
    different schedules, or one replica under different ZeRO stages.
    """
    known: set[Hashable] = set()
    found: list[RankedPlan] = []
    for item in items:
        layout = layout_of(item)
        _, replicas, devices, microbatches, sharding, placed, _, _, offload = layout
        alike = (replicas, devices, microbatches, sharding, placed, offload, item.step_time_s, item.reserved_bytes)
        if layout not in known and alike not in known:
            found.append(item)
        known |= {layout, alike}
    return found


def is_as_fast(item: RankedPlan, fastest: RankedPlan) -> bool:
    """Return whether a plan is as fast as the fastest one within the error of predictions (see the module)."""
    ratio = item.aimed_s / fastest.aimed_s
    if ratio <= 1 + LEAST_DIFFERENCE:
        return True
    mine, best = item.interval, fastest.interval
    if ratio > 1 + MOST_DIFFERENCE or mine is None or best is None or item.makespan_s is not None:
        return False
    return min(mine.low_s / best.low_s, mine.high_s / best.high_s) <= 1


def layout_of(item: RankedPlan) -> tuple[Hashable, ...]:
    """Return the properties that distinguish plans in a table, the schedule first.

    Stage boundaries and the division of microbatches among replicas are not included.
    """
    plan = item.plan
    return (
        plan.schedule,
        tuple(len(stage.ranks) for stage in plan.stages),
        plan.num_devices,
        plan.num_microbatches,
        replace(plan.sharding, placements=()),
        bool(plan.sharding.placements),
        (plan.exchange.zero, plan.exchange.shard_size),
        item.recompute or plan.recompute,
        plan.offload,
    )


def _with_intervals(items: Sequence[RankedPlan], predict_interval: Callable[[Plan], StepInterval]) -> list[RankedPlan]:
    found: list[RankedPlan] = []
    num_done = 0
    for item in items:
        plan = item.plan
        num_done += plan.num_microbatches * (6 * len(plan.stages) - 4) * max(len(stage.ranks) for stage in plan.stages)
        if found and num_done > MAX_INSTRUCTIONS:
            found.append(item)
        else:
            found.append(replace(item, interval=predict_interval(plan)))
    return found


def _num_mechanisms(item: RankedPlan) -> int:
    """Return the number of mechanisms that a plan uses."""
    plan, sharding = item.plan, item.plan.sharding
    return sum(
        (
            len(plan.stages) > 1,
            sharding.tensor > 1,
            sharding.context > 1,
            sharding.expert > 1,
            plan.exchange.zero > 0,
            bool(plan.recompute),
            plan.offload != ON_DEVICE,
        )
    )


def _burden(item: RankedPlan) -> tuple[int, int, int, float]:
    rank = item.fullest_rank
    hundredths = round(100 * item.reserved_bytes[rank] / max(item.memory_limit_bytes[rank], 1))
    return hundredths, _num_mechanisms(item), len(item.plan.stages), item.aimed_s
