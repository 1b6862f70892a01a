"""Output of `simulate --explain`: the critical path of a step, and what would make it shorter."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.cost import CostModel
    from meshwright.simulator import Contention
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.graph import Graph
    from meshwright.spec.placement import Placement
    from meshwright.spec.plan import Plan


def explain_bounds(
    plan: Plan | Placement, graph: Graph, machine: Cluster, cost: CostModel, contention: Contention
) -> tuple[dict[str, Any], list[Any]]:
    """Rows for JSON and renderables for people."""
    from meshwright.report import explanation_rows, explanation_table
    from meshwright.simulator import SHORTER, explain_step

    explained = explain_step(plan, graph, machine, cost=cost, contention=contention)
    bounds = [bound.name.lower() for bound in explained.bounds]
    levers = [asdict(item) for item in explained.levers]
    rows = explanation_rows(explained.path, bounds, levers)
    return rows, ["", explanation_table(explained.path, bounds, levers, SHORTER)]
