"""A plan on its cluster as teams see it: one rank per team, the local graph, and costs that know of both.

Devices that the plan leaves out are not there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.program import lower_plan
from meshwright.spec import Cluster, Graph, Plan, check_plan


class Teams(NamedTuple):
    """A plan of a local graph on a cluster of teams, and their costs."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    cost: CostModel


def form_teams(plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel) -> Teams:
    """What is simulated of a plan that leaves devices out, splits ops, computes again or compiles.

    Another stays as it is.

    Raises PlanError for a plan that fits graph or cluster not, ClusterError for teams that do not fit the nodes.
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
