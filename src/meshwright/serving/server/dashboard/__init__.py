"""The page of the admin port, which shows the server's state each second, from its own and the common page files."""

from __future__ import annotations

from functools import cache
from importlib import resources

from meshwright.report.page import page_script, page_style

_HTML, _SCRIPT, _STYLE = b"text/html; charset=utf-8", b"text/javascript; charset=utf-8", b"text/css; charset=utf-8"
# In dependency order.
SCRIPTS = ("figures.js", "sparklines.js", "dashboard.js")


@cache
def read_asset(path: str) -> tuple[bytes, bytes] | None:
    """Return content type and bytes of a file of the page; None if ``path`` is not one of its files."""
    match path:
        case "/":
            return _HTML, _read("dashboard.html").encode()
        case "/dashboard.css":
            return _STYLE, f"{page_style()}\n{_read('dashboard.css')}".encode()
        case "/dashboard.js":
            return _SCRIPT, "\n".join([page_script(), *map(_read, SCRIPTS)]).encode()
        case _:
            return None


def _read(name: str) -> str:
    return (resources.files("meshwright.serving.server.dashboard") / name).read_text(encoding="utf-8")
