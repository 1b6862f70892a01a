"""Reduce a plan to one rank per team (`form_teams`), with the graph, cluster and costs of one device of each team.

A team is the devices of the tensor, context and expert axes. Devices that the plan leaves idle are removed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.program import lower_plan
from meshwright.spec import Cluster, Graph, Plan, check_plan


class Teams(NamedTuple):
    """A plan of a local graph on a cluster whose ranks are teams, and the cost model of one device of each team.

    A team is the devices of the tensor, context and expert axes.
    """

    plan: Plan
    graph: Graph
    cluster: Cluster
    cost: CostModel


def form_teams(plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel) -> Teams:
    """Return the plan, graph, cluster and costs to simulate for a plan.

    A plan that leaves devices idle, splits ops, recomputes or compiles is lowered (`program.plan_lowering`); other
    plans are returned unchanged. Raises PlanError if the plan does not match the graph or the cluster, ClusterError if
    teams do not fit the nodes.
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
