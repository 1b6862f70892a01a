"""Refuse all requests except those of a page that this server sent.

The server listens on 127.0.0.1, but any page that is open in the user's browser can send requests there, and a foreign
name can be made to resolve to it (DNS rebinding). Therefore

- ``Host`` must be this server by its own address or ``localhost``;
- ``Sec-Fetch-Site``, if the browser sends it, must not name another site, except for the page itself;
- a POST must name this server as its ``Origin`` and carry JSON of a known, small length.

Answers have the headers of all pages that are served (`report.page.SERVED_HEADERS`).
"""

from __future__ import annotations

from email.message import Message

# A request contains two links and some numbers.
MAX_BODY_BYTES = 64 * 1024


class RefusedError(Exception):
    """A refused request: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def check_request(headers: Message, port: int, *, is_page: bool) -> None:
    """Raise RefusedError for a request to another host or from another site; ``is_page``: links to it are allowed."""
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1 or hosts[0].lower() not in _names(port):
        raise RefusedError(403, f"This server answers only requests to 127.0.0.1:{port} or localhost:{port}.")
    site = headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none") and not is_page:
        raise RefusedError(403, "Requests from other sites are refused.")


def check_post(headers: Message, port: int) -> int:
    """The length of a POST's body; raises RefusedError unless it is JSON from this server's own page."""
    origin = headers.get("Origin", "")
    if origin.lower() not in {f"http://{name}" for name in _names(port)}:
        raise RefusedError(403, "Only the page of this server may send requests.")
    if headers.get_content_type() != "application/json":
        raise RefusedError(415, "Requests are JSON (application/json).")
    length = headers.get("Content-Length", "")
    if headers.get("Transfer-Encoding") is not None or not (length.isascii() and length.isdigit()):
        raise RefusedError(411, "A request must state its length (Content-Length).")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        raise RefusedError(413, f"A request has at most {MAX_BODY_BYTES} bytes.")
    return int(length)


def _names(port: int) -> tuple[str, ...]:
    return f"127.0.0.1:{port}", f"localhost:{port}"
