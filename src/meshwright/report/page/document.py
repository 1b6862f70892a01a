"""The page document: the content of one HTML report, as plain JSON.

    title        the heading of the page
    cluster      `cluster_part`, or absent
    results      one or more `result_part`s; the page shows one at a time
    plans        `plans_part`: the table and the Pareto plot; row i belongs to result i where there is one
    comparison   `comparison_part`
    tables       [{title, rows}]: anything else that is a table of plain rows
    provenance   {label: text}: command, versions, graph, ...
    documents    {file name: document}: documents that can be saved from the page; the page adds timelines

Keys of rows end with their units (``_s``, ``_bytes``, ``_share``), as in all rows of `meshwright.report`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright import __version__
from meshwright.report.page.layouts import plan_part
from meshwright.report.page.results import memory_part
from meshwright.report.page.timelines import timeline_part
from meshwright.spec import Cluster, Graph, Plan, Timeline

Row = dict[str, Any]
SCHEMA = "meshwright/page/1"

# The explicit directional formatting characters of Unicode (UAX #9, section 2).
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def page_document(
    title: str,
    *,
    results: Sequence[Row] = (),
    cluster: Row | None = None,
    plans: Row | None = None,
    comparison: Row | None = None,
    tables: Sequence[Row] = (),
    provenance: Mapping[str, str] | None = None,
    documents: Mapping[str, Any] | None = None,
) -> Row:
    """Put parts together; a part that is not given has no section on the page.

    Characters that change the direction of writing are escaped as in JSON, or one name could reverse the sentence
    around it. ``documents`` are saved unchanged.
    """
    shown: Row = {
        "schema": SCHEMA,
        "title": title,
        "cluster": cluster,
        "results": list(results),
        "plans": plans,
        "comparison": comparison,
        "tables": list(tables),
        "provenance": dict(provenance or {}),
    }
    return {**_spell_directions(shown), "documents": dict(documents or {})}


def _spell_directions(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    if isinstance(value, dict):
        return {_spell_directions(key): _spell_directions(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_directions(item) for item in value]
    return value


def result_part(
    name: str,
    *,
    plan: Plan | None = None,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    timelines: Sequence[Timeline] = (),
    memory_parts: Sequence[Mapping[str, int]] = (),
    memory_limits_bytes: Sequence[int] = (),
    facts: Mapping[str, Any] | None = None,
    explanation: str = "",
    basis: str = "",
    deflate: bool = True,
) -> Row:
    """One plan, or one timeline, with all its known facts.

    Args:
        name: Names the result in the page.
        plan: The plan, for the drawing on the cluster.
        graph: Names its layers.
        cluster: Gives devices, links and memory limits.
        timelines: Predicted, measured or both; the first is shown first.
        memory_parts: Bytes by owner at the peak, one mapping per rank (`PeakMemory.parts`).
        memory_limits_bytes: The limit of each rank, if not all of its device's memory.
        facts: A row of headline figures; keys end with their units.
        explanation: Why this plan is best, from `Plans.explain`.
        basis: What the figures are based on, from `CostModel.explain_basis`.
        deflate: See `timeline_part`.
    """
    num_ranks = plan.num_ranks if plan is not None else max((item.num_ranks for item in timelines), default=0)
    peaks = next((item.peak_memory_bytes for item in timelines if item.peak_memory_bytes), ())
    origin = next((item.origin for item in timelines if item.peak_memory_bytes), "")
    memory = memory_part(
        num_ranks, peak_memory_bytes=peaks, parts=memory_parts, cluster=cluster, limits_bytes=memory_limits_bytes
    )
    return {
        "name": name,
        "facts": dict(facts or {}),
        "plan": None if plan is None else plan_part(plan, graph, cluster, timelines[0] if timelines else None),
        "timelines": [timeline_part(item, deflate=deflate) for item in timelines],
        # Parts come from a simulation; a timeline has only the peaks.
        "memory": {**memory, "origin": "predicted" if memory_parts else origin},
        "explanation": explanation,
        "basis": basis,
    }


def versions() -> str:
    """The versions that a figure may depend on."""
    return f"meshwright {__version__}, Python {platform.python_version()}, numpy {np.__version__}"
