"""What one rank computes under a plan: its share of the graph, what runs again in it, and the plan of that.

A plan may split ops over teams of devices and let parts of the graph run again. Lowered, its graph is the local graph
of one device of a team, with what that exchanges and what it computes again; its plan says of this graph what the plan
says of the whole one, and splits nothing further. All that builds, prices and simulates programs works on these two.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from meshwright.spec.graph import Graph
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.recompute import Ranges, with_recompute
from meshwright.spec.sharding import UNSHARDED, Sharding


def lower_plan(plan: Plan, graph: Graph) -> tuple[Plan, Graph]:
    """The plan of the local graph, and that graph; a plan that neither splits nor recomputes stays itself.

    Raises PlanError for a plan that does not fit the graph, or a sharding that its ops cannot take.
    """
    if plan.sharding.is_whole and not plan.recompute:
        return plan, graph
    check_plan(plan, graph)
    local = lower_graph(graph, plan.sharding, plan.recompute)
    return replace(plan, graph_hash=local.content_hash, sharding=UNSHARDED, recompute=()), local


@lru_cache(maxsize=16)
def lower_graph(graph: Graph, sharding: Sharding, recompute: Ranges) -> Graph:
    """The local graph of one device: its share of every op, what it exchanges, and what it computes again."""
    if not sharding.is_whole:
        raise NotImplementedError
    return with_recompute(graph, recompute)
