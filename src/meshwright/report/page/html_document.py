"""The page document: the content of one HTML report, as plain JSON (`page_document`); and as one file (`page_html`).

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

import base64
import hashlib
import html
import json
import platform
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from meshwright import __version__
from meshwright.report.page.page_results import memory_part, plan_part, timeline_part
from meshwright.spec import Cluster, DocumentError, Graph, Plan, Timeline, write_text

# In the order of their dependencies.
SCRIPTS = (
    "core.js",
    "format.js",
    "columns.js",
    "spans.js",
    "texts.js",
    "cluster.js",
    "schedule.js",
    "timeline.js",
    "input.js",
    "search.js",
    "memory.js",
    "comparison.js",
    "plans.js",
    "save.js",
)
# Policy of a page that is served with its files: its own script, style and answers are allowed, and nothing else.
SERVED_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Only for a stand-alone page: reads the document of the page and draws it.
START_SCRIPT = "start.js"


@cache
def page_script() -> str:
    """Return the JavaScript of all parts: it defines the global ``Meshwright`` and draws nothing by itself."""
    return "\n".join(_read(name) for name in SCRIPTS)


@cache
def page_style() -> str:
    """Return the style sheet of all parts, with colours for light and dark."""
    return _read("page.css")


def embed_json(data: Any) -> str:
    """Return JSON that is safe inside a ``<script type="application/json">`` element, whatever its strings contain.

    Raises DocumentError for a number that is not finite.
    """
    try:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise DocumentError("The page has a number that is not finite; only finite numbers can be shown.") from None
    # U+2028 and U+2029 end lines for old JavaScript parsers.
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# The file needs nothing else: no network, no library, no second file. Pictures are drawn by Meshwright's own code
# (about 90 kB of JavaScript, ``*.js`` beside this module) on canvas and SVG: plotly, the usual choice, is larger by
# itself than a whole report may be (its bundle exceeds 2 MB).
#
# A hostile name does no harm. The document is in a data block in which ``<``, ``>`` and ``&`` are written as escapes,
# so no text can end the block. Scripts put text into the page as text, never as markup. The Content-Security-Policy
# allows exactly the one script and the one style sheet of the page (by their SHA-256) and no request at all.
def page_html(document: dict[str, Any]) -> str:
    """Return the whole page as the text of one HTML file."""
    script, style = page_script() + "\n" + _read(START_SCRIPT), page_style()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    pieces = {
        "policy": policy,
        "title": html.escape(document["title"]),
        "style": style,
        "script": script,
        "document": embed_json(document),
    }
    # Split, not replaced one after the other: a title may hold the name of another piece.
    parts = _read("page.html").split("%%")
    return "".join(pieces[part] if place % 2 else part for place, part in enumerate(parts))


def write_page(document: dict[str, Any], path: Path | str) -> Path:
    """Write the page atomically. Raises DocumentError if it cannot be written."""
    return write_text(page_html(document), path)


@cache
def _read(name: str) -> str:
    return (resources.files("meshwright.report.page") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


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
    """Return the page document with these parts; a part that is not given has no section on the page.

    Characters that change the direction of writing are escaped as in JSON; otherwise a name could reverse the sentence
    around the name. ``documents`` are kept unchanged.
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
    """Return the part of a page for one plan, or one timeline, with all its known facts.

    Args:
        name: Names the result in the page.
        plan: The plan, for the drawing on the cluster.
        graph: Names its layers.
        cluster: Gives devices, links and memory limits.
        timelines: Predicted, measured or both; the first is shown first.
        memory_parts: Bytes by owner at the peak, one mapping per rank (`PeakMemory.parts`).
        memory_limits_bytes: The limit of each rank, if not all of its device's memory.
        facts: A row of headline figures; keys end with their units.
        explanation: Sentences on why this plan is best, from `Plans.explain`.
        basis: A sentence on the basis of the op costs, from `CostModel.explain_basis`.
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
    """Return the versions of Meshwright, Python and numpy as one line."""
    return f"meshwright {__version__}, Python {platform.python_version()}, numpy {np.__version__}"
