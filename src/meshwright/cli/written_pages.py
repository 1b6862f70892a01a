"""``--html FILE`` and ``--open``: the path of a result's page, and what the page states of its origin."""

from __future__ import annotations

import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.output import open_address
from meshwright.spec import DocumentError

HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write one page with pictures to this file (.html); it needs no network.")
]
OpenOption = Annotated[
    bool, typer.Option("--open", help="Open the page in the browser; without --html, a temporary page is written.")
]


def page_path(html: Path | None, open_browser: bool, name: str) -> Path | None:
    """Return the path of the page: that of --html, with --open alone a temporary one, or None for no page.

    Raises DocumentError for a name that does not end in .html.
    """
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise DocumentError(f"--html {html}: the name of a page ends in .html. Give such a name.")
    if html is None and open_browser:
        return Path(tempfile.mkdtemp(prefix="meshwright-")) / f"{name}.html"
    return html


def put_page(document: dict[str, Any], path: Path, open_browser: bool) -> str:
    """Write the page, open it in the browser if asked to, and return a line with its path to print."""
    from meshwright.report.page import write_page

    write_page(document, path)
    if open_browser:
        open_address(path.resolve().as_uri())
    return f"page written to {path}"


def provenance() -> dict[str, str]:
    """Return what every page states of its origin: the command, the time, and the versions."""
    from meshwright.report.page import versions

    typed = shlex.join(["meshwright", *sys.argv[1:]]) if Path(sys.argv[0]).stem in ("meshwright", "__main__") else ""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {**({"command": typed} if typed else {}), "written": date, "versions": versions()}
