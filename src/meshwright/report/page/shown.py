"""Page documents of a single document of any kind (`shown_document`), and of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.report.comparison import Comparison, timeline_rows
from meshwright.report.page.html_document import page_document, result_part
from meshwright.report.page.page_results import cluster_part, comparison_part
from meshwright.report.plan_tables import graph_rows, graph_total
from meshwright.report.report_tables import MEASURED_PARTS, measurement_rows, placement_rows, program_rows
from meshwright.spec import Cluster, Graph, Measurements, Placement, Plan, Program, Timeline, encode_document
from meshwright.spec.used_devices import used_of

Row = dict[str, Any]
Shown = Graph | Plan | Placement | Program | Timeline | Cluster | Measurements


def shown_document(
    value: Shown,
    name: str,
    *,
    batch_size: int = 1,
    cluster: Cluster | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Row:
    """Return the page document of a document of any kind.

    Args:
        value: The document.
        name: Used in the title if the document has no name of its own.
        batch_size: Samples per batch for the figures of a graph.
        cluster: The cluster of a plan; without it, the page shows the plan alone.
        provenance: Labels and texts on the origin of the page, such as the command.
    """
    match value:
        case Graph():
            parts = _graph_parts(value, batch_size)
        case Plan():
            parts = _plan_parts(value, cluster)
        case Placement():
            parts = _placement_parts(value)
        case Program():
            parts = _program_parts(value)
        case Timeline():
            parts = _timeline_parts(value, name)
        case Cluster():
            parts = {"title": value.name, "cluster": cluster_part(value), "documents": _saved(value)}
        case Measurements():
            parts = _measurement_parts(value)
    return page_document(**{**parts, "provenance": {**parts.get("provenance", {}), **(provenance or {})}})


def comparison_document(
    comparison: Comparison, predicted: Timeline, measured: Timeline, *, provenance: Mapping[str, str] | None = None
) -> Row:
    """Return the page document that compares a prediction with a measurement."""
    name = "Predicted and measured"
    return page_document(
        name,
        results=[result_part(name, timelines=[predicted, measured])],
        comparison=comparison_part(comparison, predicted, measured),
        provenance=provenance,
        documents=_saved(comparison),
    )


def _saved(value: Any) -> Row:
    return {f"{type(value).__name__.lower()}.json": encode_document(value)}


def _graph_parts(graph: Graph, batch_size: int) -> Row:
    samples = "1 sample" if batch_size == 1 else f"{batch_size} samples"
    rows = [*graph_rows(graph, batch_size), graph_total(graph, batch_size)]
    # Nothing to save: the whole graph may be larger than a page, and it has its own file.
    return {
        "title": graph.name,
        "tables": [{"title": f"Layers, for {samples}", "rows": rows}],
        "provenance": {"graph": graph.content_hash, "mode": graph.mode},
    }


def _plan_parts(plan: Plan, cluster: Cluster | None) -> Row:
    cluster = None if cluster is None else used_of(plan, cluster)
    return {
        "title": f"{plan.model} on {plan.cluster}",
        "results": [result_part(plan.describe(), plan=plan, cluster=cluster)],
        "cluster": None if cluster is None else cluster_part(cluster),
        "provenance": {"graph": plan.graph_hash},
        "documents": _saved(plan),
    }


def _placement_parts(placement: Placement) -> Row:
    return {
        "title": f"{placement.model} on {placement.cluster}",
        "tables": [{"title": placement.describe(), "rows": placement_rows(placement)}],
        "provenance": {"graph": placement.graph_hash},
        "documents": _saved(placement),
    }


def _program_parts(program: Program) -> Row:
    # Instructions by the million do not belong in a page.
    return {
        "title": f"{program.schedule} on {program.num_ranks} ranks",
        "tables": [{"title": "Instructions of each rank", "rows": program_rows(program)}],
        "provenance": {"plan": program.plan_hash},
    }


def _timeline_parts(timeline: Timeline, name: str) -> Row:
    rows = timeline_rows(timeline)
    facts = {key: rows[key] for key in ("median_step_s", "slowest_step_s", "bubble_share", "num_ranks", "num_spans")}
    # A timeline is saved from what the page draws.
    return {
        "title": f"{name}: {timeline.origin} timeline",
        "results": [result_part(f"{timeline.origin} timeline", timelines=[timeline], facts=facts)],
        "tables": [{"title": "Where each rank's time goes, per step", "rows": rows["ranks"]}],
    }


def _measurement_parts(measurements: Measurements) -> Row:
    rows = measurement_rows(measurements)
    facts = {key: value for key, value in rows.items() if key not in MEASURED_PARTS and value not in (None, "")}
    return {
        "title": f"Measurements of {measurements.device}",
        "tables": [
            {"title": "What was measured", "rows": [facts]},
            *(
                {"title": title[0].upper() + title[1:], "rows": rows[key]}
                for key, title in MEASURED_PARTS.items()
                if rows[key]
            ),
        ],
        "documents": _saved(measurements),
    }
