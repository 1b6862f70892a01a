"""How fast is a step on what is left of a cluster? The best plan for it, of the same model and workload."""

from __future__ import annotations

from meshwright.cost import CostModel
from meshwright.planner.search import search_plans
from meshwright.spec import Graph, Plan, PlanError
from meshwright.spec.plan import BASIC_SCHEDULES


def replan_seconds(plan: Plan, graph: Graph, cost: CostModel) -> float | None:
    """Seconds of a step of the best plan on the machines of a cost model; None where none fits.

    It takes all devices, or, if there is no plan for so many, the next smaller power of two. A graph that was captured
    for one microbatch size keeps that.
    """
    count = cost.cluster.num_ranks
    for num_ranks in dict.fromkeys((count, 2 ** (count.bit_length() - 1))):
        try:
            found = search_plans(
                lambda _: graph,
                cost.cluster,
                plan.workload,
                cost=cost,
                num_devices=num_ranks,
                max_plans=1,
                microbatch_sizes=None if graph.batch_size is None else (graph.batch_size,),
                schedules=(plan.schedule,) if plan.schedule in BASIC_SCHEDULES else BASIC_SCHEDULES,
                exchange=plan.exchange,
                offload=(plan.offload,),
            )
        except PlanError:
            continue
        return found.best.step_time_s
    return None
