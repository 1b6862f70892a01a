"""A request and its answer; for HTTP, also parsing of method, path and headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from meshwright.serving.server.values import SHOWN, BadRequest

if TYPE_CHECKING:
    from meshwright.serving.server.front import FrontendModel
    from meshwright.serving.server.gate import Ticket
    from meshwright.serving.server.tensors import ParsedRequest
    from meshwright.serving.server.trace_context import TraceContext

# Names of the headers that are used; all others are ignored.
WANTED = frozenset(
    {
        *(b"host", b"connection", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"),
        *(b"accept-encoding", b"authorization", b"traceparent", b"tracestate", b"x-request-timeout-ms"),
        b"inference-header-content-length",
    }
)
# Those of them that may occur several times, as one list.
LISTS = frozenset(
    (b"connection", b"transfer-encoding", b"content-encoding", b"accept-encoding", b"traceparent", b"tracestate")
)
_MOST_DIGITS = 15


class Asker(Protocol):
    """The connection that a request came from, to which its answer is sent."""

    def settle(self, exchange: HttpExchange) -> None:
        """Send the answer of an exchange."""


class Refusal(Exception):  # noqa: N818 - it is an answer
    """An error answer to a request, with an HTTP status; ``fields`` are further header lines."""

    def __init__(self, status: int, sentence: str, fields: bytes = b"") -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.fields = status, sentence, fields


class InboundRequest:
    """A request of any protocol, as a frontend handles it; each attribute is None until it is known.

    ``begun_ns``: when it started to arrive (`time.monotonic_ns`). ``served``: its model. ``asked``: its parsed content.
    ``ticket``: its entry at the gate, while the scheduler has it. ``trace``: its W3C trace context.
    """

    asked: ParsedRequest | None = None
    served: FrontendModel | None = None
    ticket: Ticket | None = None
    trace: TraceContext | None = None
    begun_ns: int


class HttpExchange(InboundRequest):
    """A request over HTTP, and its answer once it is known."""

    # Defaults for most requests: whether the connection is closed after the answer, and whether that has been sent;
    # header lines that do not depend on the answer; the memory (about bytes) that the request occupies meanwhile.
    closes = has_left = False
    fields = b""
    owed = 0
    answer: bytes | None = None

    def __init__(
        self, asker: Asker, method: bytes, url: bytes, headers: dict[bytes, bytes], body: bytes, begun_ns: int
    ) -> None:
        self.asker, self.method, self.url, self.headers, self.body = asker, method, url, headers, body
        self.begun_ns = begun_ns


def path_of(url: bytes) -> str:
    """Return the path of a request's URL, which may be a path with a query or a whole URL."""
    text = url.partition(b"?")[0].decode("latin-1")
    return text if text[:1] == "/" or "://" not in text else "/" + text.partition("://")[2].partition("/")[2]


def check_method(exchange: HttpExchange, allowed: bytes) -> None:
    """Raise Refusal for a method that is not in ``allowed``, a list in the form of an ``Allow`` header."""
    if exchange.method not in allowed.split(b", "):
        raise Refusal(
            405,
            f"{exchange.method.decode()} is not possible at this path; expected {allowed.decode()}.",
            b"Allow: " + allowed + b"\r\n",
        )


def read_integer(name: str, text: bytes, least: int = 0) -> int:
    """Return the value ``text`` of the header ``name`` as an integer. Raises BadRequest if it is below ``least``."""
    digits = text.strip()
    if not (digits.isdigit() and len(digits) <= _MOST_DIGITS and int(digits) >= least):
        raise BadRequest(f"{name} is {show(text)!r}; expected an integer, at least {least}.")
    return int(digits)


def show(text: bytes) -> str:
    """Return the first characters of received bytes, for an error message."""
    return text[:SHOWN].decode("latin-1")
