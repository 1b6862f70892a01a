"""One self-contained HTML page per result: what a plan does, when, where, and in how much memory.

Python turns facts into a **page document** (plain JSON, `page_document`), JavaScript draws it, and `page_html` inlines
both into one file. Pages that are served, such as a playground, send documents of the same form to the same script.

Python:

    document = page_document(title, results=[result_part(name, plan=..., timelines=[...])], cluster=cluster_part(...))
    shown_document(plan, name), comparison_document(...)      pages that need nothing but documents
    write_page(document, path)              one file;  page_html(document) is its text
    page_script(), page_style()             what another page inlines: the script draws nothing by itself

JavaScript, one global object:

    Meshwright.render(root, document, options)   draws into an element; a promise that resolves after the first paint
    Meshwright.update(root, document)            the same element with another document: zoom, chosen rank and opened
                                                 tables stay; sections come and go with their data
    Meshwright.setTheme("auto" | "light" | "dark")
    Meshwright.format.seconds(x), .bytes(x), .count(x), .cell(key, value)      as `meshwright.spec.units` prints them

``options``: ``parts``, the sections to draw and their order, of ``summary``, ``explanation``, ``plans``,
``comparison``, ``cluster``, ``schedule``, ``timeline``, ``memory``, ``tables``, ``provenance``, ``save`` (all);
``level``, the level of their headings (default 2); ``onSelect(index)``, called when a plan of the Pareto plot is chosen
(the page itself then shows that result).
A section is drawn where the document has its data. Each is one function in a file of its own,
``Meshwright.part(name, title, {has(context), create(box, context)})``; ``create`` returns
``{update(context), redraw()}``.

Styles: everything is under the class ``mw`` on the root, colours are custom properties (``--mw-accent``,
``--mw-text``, ``--mw-ground``, ``--mw-panel``, ``--mw-line``, ``--mw-muted``), set for light and dark on ``:root``.
"""

from meshwright.report.page.columns import pack_column
from meshwright.report.page.html_document import (
    SERVED_HEADERS,
    embed_json,
    page_document,
    page_html,
    page_script,
    page_style,
    result_part,
    versions,
    write_page,
)
from meshwright.report.page.page_results import (
    cluster_part,
    comparison_part,
    memory_part,
    pareto_front,
    plan_part,
    plans_part,
    timeline_part,
)
from meshwright.report.page.shown import Shown, comparison_document, shown_document

__all__ = [
    "SERVED_HEADERS",
    "Shown",
    "cluster_part",
    "comparison_document",
    "comparison_part",
    "embed_json",
    "memory_part",
    "pack_column",
    "page_document",
    "page_html",
    "page_script",
    "page_style",
    "pareto_front",
    "plan_part",
    "plans_part",
    "result_part",
    "shown_document",
    "timeline_part",
    "versions",
    "write_page",
]
