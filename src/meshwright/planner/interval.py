"""The 80 % interval of a predicted step time: the plan simulated with all costs as fast, and as slow, as they may be.

    low, high of a step  =  step(every cost at the low, the high end of its 80 % interval)

Ops of a device kind are scaled by low / t and by high / t of their sum (`cost.costs.add_intervals`); every transfer,
optimizer step and host has its own ends (`CostModel.at_end`); bubbles and exposed times follow. Ops, transfers,
optimizer and hosts err independently: that all are late together is rarer than that one of them is, hence the interval
of a step covers more than 80 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost import CostModel
from meshwright.simulator import Contention, form_teams, simulate_plan
from meshwright.spec import Cluster, Graph, Plan, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """Ends of an 80 % interval of a step time; ``measured`` is False if every op is a datasheet roofline."""

    low_s: float
    high_s: float
    measured: bool


def predict_step_interval(
    plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel, *, contention: Contention = "queued"
) -> StepInterval:
    """Return the interval of a plan's step time, from the intervals of its ops, transfers and optimizer steps."""
    plan, graph, cluster, cost = form_teams(plan, graph, cluster, cost)
    kinds = {cluster.device_kind(rank).name: cluster.device_kind(rank) for rank in range(plan.num_ranks)}
    bases = {basis for kind in kinds.values() for basis in cost.estimate_ops(graph, plan.microbatch_size, kind).basis}
    low, high = (
        simulate_plan(plan, graph, cluster, cost=cost.at_end(end), contention=contention).step_time_s
        for end in ("low", "high")
    )
    return StepInterval(low_s=low, high_s=high, measured=bases != {"roofline"})


def explain_step_interval(interval: StepInterval) -> str:
    """Return the interval as one sentence."""
    ends = f"{format_seconds(interval.low_s)} to {format_seconds(interval.high_s)}"
    if interval.measured:
        return f"Step time, 80 % interval (from its ops, transfers and optimizer): {ends}."
    return f"Step time, 80 % interval (from datasheets; nothing was measured): {ends}."
