"""Which requests are answered at all? Those of a page that this server sent, and of nobody else.

The server listens on 127.0.0.1, but any page that is open in the user's browser can send requests there, and a name
of a stranger can be made to lead there (DNS rebinding). So

- ``Host`` must be this server by its own address or ``localhost``;
- ``Sec-Fetch-Site``, where the browser sends it, must not say that another site asks, but for the page itself;
- a POST must name this server as its ``Origin`` and bring JSON of a known, small length.

Answers carry the headers of all pages that are served (`report.page.SERVED_HEADERS`).
"""

from __future__ import annotations

from email.message import Message

# A request holds two links and some numbers.
MAX_BODY_BYTES = 64 * 1024


class RefusedError(Exception):
    """A request that is not answered: HTTP status and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def check_request(headers: Message, port: int, *, is_page: bool) -> None:
    """Raise RefusedError unless the request is for this server and not by another site; ``is_page``: links may lead."""
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1 or hosts[0].lower() not in _names(port):
        raise RefusedError(403, f"This server answers only as 127.0.0.1:{port} or localhost:{port}.")
    site = headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none") and not is_page:
        raise RefusedError(403, "Another site may not ask this server.")


def check_post(headers: Message, port: int) -> int:
    """The length of a POST's body; raises RefusedError unless it is JSON from this server's own page."""
    origin = headers.get("Origin", "")
    if origin.lower() not in {f"http://{name}" for name in _names(port)}:
        raise RefusedError(403, "Only the page of this server may send requests.")
    if headers.get_content_type() != "application/json":
        raise RefusedError(415, "Requests are JSON (application/json).")
    length = headers.get("Content-Length", "")
    if headers.get("Transfer-Encoding") is not None or not (length.isascii() and length.isdigit()):
        raise RefusedError(411, "A request says its length (Content-Length).")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        raise RefusedError(413, f"A request has at most {MAX_BODY_BYTES} bytes.")
    return int(length)


def _names(port: int) -> tuple[str, ...]:
    return f"127.0.0.1:{port}", f"localhost:{port}"
