"""How sure is a predicted step time: the plan simulated again with its ops as fast, and as slow, as they may be.

All ops of a device kind are scaled by low / t and by high / t of their sum (`cost.prices.add_intervals`), so that the
bubble of a pipeline follows. Transfers and optimizer steps stay as they are.
"""

from __future__ import annotations

from meshwright.cost import CostModel
from meshwright.simulator import simulate_plan
from meshwright.spec import Cluster, Graph, Plan, format_seconds


def predict_step_interval(plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel) -> tuple[float, float] | None:
    """Ends of the 80 % interval of the step time, in seconds; None where every op is a roofline, a bound only."""
    kinds = {cluster.device_kind(rank).name: cluster.device_kind(rank) for rank in range(plan.num_ranks)}
    bases = {basis for kind in kinds.values() for basis in cost.price_ops(graph, plan.microbatch_size, kind).basis}
    if bases == {"roofline"}:
        return None
    low, high = (simulate_plan(plan, graph, cluster, cost=cost.at_end(end)).step_time_s for end in ("low", "high"))
    return low, high


def explain_step_interval(interval: tuple[float, float] | None) -> str:
    """One sentence, or nothing where there is no interval."""
    if interval is None:
        return ""
    low, high = (format_seconds(end) for end in interval)
    return f"Step time, 80 % interval by that of its ops: {low} to {high}."
