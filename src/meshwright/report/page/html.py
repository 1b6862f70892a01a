"""A page document as one HTML file that needs nothing else: no network, no library, no second file.

Pictures are drawn by Meshwright's own code (about 90 kB of JavaScript, ``*.js`` beside this module) on canvas and SVG:
plotly, the usual choice, is larger by itself than a whole report may be (its bundle exceeds 2 MB).

A hostile name does no harm: the document is in a data block in which ``<``, ``>`` and ``&`` are written as escapes, so
nothing in it can end the block; scripts put text into the page as text, never as markup; and the
Content-Security-Policy allows exactly the one script and the one style sheet of the page (by their SHA-256) and no
request at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.spec import DocumentError, write_text

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
    """The JavaScript of all parts: defines the global ``Meshwright``, draws nothing by itself."""
    return "\n".join(_read(name) for name in SCRIPTS)


@cache
def page_style() -> str:
    """The style sheet of all parts, with colours for light and dark."""
    return _read("page.css")


def embed_json(data: Any) -> str:
    """JSON that is safe inside a ``<script type="application/json">`` element, whatever its strings contain.

    Raises DocumentError for a number that is not finite.
    """
    try:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise DocumentError("The page holds a number that is not finite; only finite ones can be shown.") from None
    # U+2028 and U+2029 end lines for old JavaScript parsers.
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_html(document: dict[str, Any]) -> str:
    """The whole page."""
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
