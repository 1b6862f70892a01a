"""Compare schedules: one plan's stages, simulated under several schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.cost import CostModel
from meshwright.cost.memory import backend_of
from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.evaluate import RankedPlan, evaluate_plans
from meshwright.program import OwnSchedule, max_in_flight
from meshwright.simulator import Contention
from meshwright.spec import Cluster, Graph, Plan, StageSlice, slice_graph


def compare_schedules(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    schedules: Iterable[str | OwnSchedule],
    *,
    cost: CostModel | None = None,
    contention: Contention = "queued",
) -> tuple[RankedPlan, ...]:
    """Simulate the plan as it is, then under each of the other ``schedules``, with true counts in flight."""
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    plans = dict.fromkeys([plan, *(adopt_schedule(plan, schedule, graph, cost) for schedule in schedules)])
    return evaluate_plans(tuple(plans), graph, cluster, cost, contention=contention)


def schedule_rows(items: Sequence[RankedPlan], graph: Graph, cost: CostModel) -> list[dict[str, Any]]:
    """Return one plain row per schedule.

    Keys: ``schedule``, ``step_s``, ``samples_per_s``, ``bubble_share``, ``in_flight`` (the most microbatches that a
    replica holds, per stage), ``activations_bytes`` (their largest total on a rank), and of the fullest rank
    ``peak_bytes``, ``limit_bytes`` and ``fits``.
    """
    return [_row(item, graph, cost) for item in items]


def _row(item: RankedPlan, graph: Graph, cost: CostModel) -> dict[str, Any]:
    plan, rank = item.plan, item.fullest_rank
    stages = slice_graph(graph, plan.bounds)
    in_flight = [max_in_flight(plan, stage.index) if stage.has_backward else 1 for stage in stages]
    kept = [count * _kept_bytes(plan, graph, stage, cost) for count, stage in zip(in_flight, stages, strict=True)]
    return {
        "schedule": plan.schedule,
        "step_s": item.step_time_s,
        "samples_per_s": item.samples_per_s,
        "bubble_share": item.bubble_fraction,
        "in_flight": in_flight,
        "activations_bytes": max(sum(kept[s] for s in plan.stages_of(rank)) for rank in range(plan.num_ranks)),
        "peak_bytes": item.peak_memory_bytes[rank],
        "limit_bytes": item.memory_limit_bytes[rank],
        "fits": item.fits,
    }


def _kept_bytes(plan: Plan, graph: Graph, stage: StageSlice, cost: CostModel) -> int:
    """Return the bytes that a microbatch keeps on a device of a stage from its forward to its backward."""
    device = backend_of(cost.cluster.device_kind(plan.stages[stage.index].ranks[0]))
    is_away = plan.offload.activations == "host"
    memory = cost.stage_memory(
        graph, stage, plan.microbatch_size, plan.workload, device=device, activations_away=is_away
    )
    return memory.microbatch_bytes
