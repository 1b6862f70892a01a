"""A plan reduced to one rank per team: its local graph, cluster and costs.

Devices that the plan leaves idle are removed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.program import lower_plan
from meshwright.spec import Cluster, Graph, Plan, check_plan


class Teams(NamedTuple):
    """A plan of a local graph on a cluster whose ranks are teams, and their costs."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    cost: CostModel


def form_teams(plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel) -> Teams:
    """Return what to simulate for a plan that leaves devices idle, splits ops, recomputes or compiles.

    Other plans are returned unchanged.

    Raises PlanError if the plan does not match the graph or the cluster, ClusterError if groups do not fit the nodes.
    """
    if plan.idle:
        check_plan(plan, graph, cluster)
        cost = without_devices(cost, plan.idle)
        plan, cluster = replace(plan, idle=()), cost.cluster
    if not plan.has_local_graph:
        return Teams(plan, graph, cluster, cost)
    check_plan(plan, graph, cluster)
    local_plan, local_graph = lower_plan(plan, graph)
    costs = cost.for_teams(plan.sharding)
    return Teams(local_plan, local_graph, costs.cluster if costs.devices else cluster, costs)
