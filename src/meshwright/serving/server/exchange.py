"""A request, and its answer; what is read off its method, path and headers if it came over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from meshwright.serving.server.values import SHOWN, BadRequest

if TYPE_CHECKING:
    from meshwright.serving.server.front import FrontendModel
    from meshwright.serving.server.gate import Ticket
    from meshwright.serving.server.tensors import ParsedRequest
    from meshwright.serving.server.trace_context import TraceContext

# Names of headers that are looked at; all others are passed over.
WANTED = frozenset(
    {
        *(b"host", b"connection", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"),
        *(b"accept-encoding", b"authorization", b"traceparent", b"tracestate", b"x-request-timeout-ms"),
        b"inference-header-content-length",
    }
)
# Those of them that may come several times, as one list.
LISTS = frozenset(
    (b"connection", b"transfer-encoding", b"content-encoding", b"accept-encoding", b"traceparent", b"tracestate")
)
_MOST_DIGITS = 15


class Asker(Protocol):
    """Whoever a request came from, as far as its answer needs it."""

    def settle(self, exchange: HttpExchange) -> None:
        """The answer is there."""


class Refusal(Exception):  # noqa: N818 - it is an answer
    """An answer that says what is wrong with a request, by a status of HTTP; ``fields`` are lines of its head."""

    def __init__(self, status: int, sentence: str, fields: bytes = b"") -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.fields = status, sentence, fields


class InboundRequest:
    """A request of any protocol, as far as a front needs it: when it began to come, and what it turned out to be."""

    asked: ParsedRequest | None = None
    served: FrontendModel | None = None
    ticket: Ticket | None = None
    trace: TraceContext | None = None
    begun_ns: int


class HttpExchange(InboundRequest):
    """A request over HTTP, and its answer once it is there."""

    # Most requests leave most of these as they are: is the connection closed after the answer, and has that been sent;
    # lines of its head that do not depend on it; what it costs a connection to have it under way, about in bytes.
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
    """The path of a request's target, which may also be a whole URL."""
    text = url.partition(b"?")[0].decode("latin-1")
    return text if text[:1] == "/" or "://" not in text else "/" + text.partition("://")[2].partition("/")[2]


def check_method(exchange: HttpExchange, allowed: bytes) -> None:
    """Raise Refusal for a method that is not among those that are allowed, as ``Allow`` has them."""
    if exchange.method not in allowed.split(b", "):
        raise Refusal(
            405,
            f"{exchange.method.decode()} is not possible at this path; expected {allowed.decode()}.",
            b"Allow: " + allowed + b"\r\n",
        )


def read_integer(name: str, text: bytes, least: int = 0) -> int:
    """The integer that a header is. Raises BadRequest."""
    digits = text.strip()
    if not (digits.isdigit() and len(digits) <= _MOST_DIGITS and int(digits) >= least):
        raise BadRequest(f"{name} is {show(text)!r}; expected an integer, at least {least}.")
    return int(digits)


def show(text: bytes) -> str:
    """Bytes of a stranger, not too many."""
    return text[:SHOWN].decode("latin-1")
