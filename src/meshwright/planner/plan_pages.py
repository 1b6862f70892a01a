"""Report pages of predictions: of one simulated plan, and of a search with every ranked plan on the Pareto plot.

For a search, timelines are simulated for the page, that of the best plan first, until they have `MAX_PAGE_SPANS` spans
in total, so that the page stays small. The page shows layout, memory and explanation of plans without a timeline, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.cost import CostModel
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.plans import Plans, explain_prediction, summarise
from meshwright.report.page import cluster_part, page_document, plans_part, result_part
from meshwright.simulator import form_teams, simulate_plan
from meshwright.spec import Cluster, Graph, Plan, Timeline, encode_document
from meshwright.spec.used_devices import used_of

Row = dict[str, Any]

# About half a megabyte of page (benchmarks/report_page.py).
MAX_PAGE_SPANS = 100_000


def _itself(plan: Plan) -> Plan:
    return plan


def plans_document(
    plans: Plans,
    graph_for: Callable[[int], Graph],
    cluster: Cluster,
    cost: CostModel,
    *,
    remark: str = "",
    provenance: Mapping[str, str] | None = None,
) -> Row:
    """Return the content of the page of a search as a dict; `report.page.write_page` writes the file.

    Args:
        plans: The result of `search_plans`.
        graph_for: Returns the graph for a microbatch size, as for the search.
        cluster: The cluster of the search.
        cost: The cost model of the search.
        remark: A line below the explanation of the best plan.
        provenance: Further entries of the page's statement of its origin.
    """
    results: list[Row] = []
    num_spans = 0
    for item in plans.ranked:
        seen = form_teams(item.plan, graph_for(item.plan.microbatch_size), cluster, cost)
        timelines: list[Timeline] = []
        if num_spans < MAX_PAGE_SPANS:
            timeline = simulate_plan(seen.plan, seen.graph, seen.cluster, cost=seen.cost).timeline
            if not results or num_spans + timeline.num_spans <= MAX_PAGE_SPANS:
                timelines.append(timeline)
            num_spans += timeline.num_spans
        words = "\n".join(filter(None, (plans.explain(item.plan), "" if results else remark)))
        part = _predicted_part(item, timelines, seen.graph, seen.cluster, seen.cost, explanation=words, whole=_itself)
        results.append(part)
    best = plans.best
    return page_document(
        f"{best.plan.model} on {best.plan.cluster}",
        results=results,
        cluster=cluster_part(used_of(best.plan, cluster)),
        plans=plans_part(plans.rows(), limit_bytes=min(best.memory_limit_bytes)),
        provenance={**_origin(best.plan, cluster), **(provenance or {})},
        documents={"plan.json": encode_document(best.plan)},
    )


def simulation_document(
    item: RankedPlan,
    timeline: Timeline,
    graph: Graph,
    cluster: Cluster,
    cost: CostModel,
    *,
    remark: str = "",
    provenance: Mapping[str, str] | None = None,
    deflate: bool = True,
    whole: Callable[[Plan], Plan] = _itself,
) -> Row:
    """Return the content of the page of one simulated plan as a dict; `report.page.write_page` writes the file.

    Args:
        item: The plan with its prediction, from `rank_simulation`.
        timeline: The timeline of that simulation.
        graph: The graph that the plan was made for.
        cluster: The cluster of the simulation.
        cost: The cost model of the simulation.
        remark: A line below the explanation of the prediction.
        provenance: Further entries of the page's statement of its origin.
        deflate: Compress the data. False is faster and larger, for pages served on this machine.
        whole: Returns the plan of the whole graph for a plan of a local graph; the page shows and saves it.
    """
    explanation = "\n".join(filter(None, (explain_prediction(item), remark)))
    part = _predicted_part(
        item, [timeline], graph, cluster, cost, explanation=explanation, whole=whole, deflate=deflate
    )
    return page_document(
        f"{item.plan.model} on {cluster.name}",
        results=[part],
        cluster=cluster_part(cluster),
        provenance={**_origin(whole(item.plan), cluster), **(provenance or {})},
        documents={"plan.json": encode_document(whole(item.plan))},
    )


def _predicted_part(
    item: RankedPlan,
    timelines: Sequence[Timeline],
    graph: Graph,
    cluster: Cluster,
    cost: CostModel,
    *,
    explanation: str,
    whole: Callable[[Plan], Plan],
    deflate: bool = True,
) -> Row:
    return result_part(
        summarise(item.plan),
        plan=whole(item.plan),
        graph=graph,
        cluster=cluster,
        timelines=timelines,
        memory_parts=[use.parts for use in item.memory],
        memory_limits_bytes=item.memory_limit_bytes,
        facts=headline_facts(item),
        explanation=explanation,
        basis=cost.explain_basis(graph, item.plan.microbatch_size),
        deflate=deflate,
    )


def _origin(plan: Plan, cluster: Cluster) -> dict[str, str]:
    return {"graph": plan.graph_hash, "cluster": cluster.name}


def headline_facts(item: RankedPlan) -> Row:
    """Return the values at the top of a plan's page as a dict; memory is that of the fullest rank."""
    rank = item.fullest_rank
    return {
        "step_time_s": item.step_time_s,
        "samples_per_s": item.samples_per_s,
        "bubble_share": item.bubble_fraction,
        "peak_memory_bytes": item.peak_memory_bytes[rank],
        "reserved_memory_bytes": item.reserved_bytes[rank],
        "memory_limit_bytes": item.memory_limit_bytes[rank],
        "fits": item.fits,
        "mfu_share": item.mfu,
    }
