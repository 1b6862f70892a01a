"""Heads of requests that were read before: clients that keep a connection send the same one again and again.

What is remembered has gone through the parser and all checks, and means the same whenever the same bytes come, up to
and with the blank line. It is used only where exactly one whole request has come; everything else is parsed.
"""

from __future__ import annotations

from meshwright.serving.server.exchange import HttpExchange

# Larger heads are parsed each time; of others so many are remembered, and then all forgotten.
LONGEST_HEAD, _MOST_HEADS = 2048, 1024
BLANK = b"\r\n\r\n"
# Such requests go through several states, or have a head that is never the same again.
_NEVER = frozenset((b"transfer-encoding", b"expect", b"traceparent"))


class RequestHead:
    """What a head says; ``length`` is that of the body."""

    __slots__ = ("headers", "length", "method", "url")

    def __init__(self, method: bytes, url: bytes, headers: dict[bytes, bytes], length: int) -> None:
        self.method, self.url, self.headers, self.length = method, url, headers, length


class Heads(dict[bytes, RequestHead]):
    """Heads by their bytes."""

    def learn(self, data: bytes, exchange: HttpExchange) -> None:
        """Remember the head of a request whose connection goes on, if it alone is what ``data`` are."""
        body, headers = exchange.body, exchange.headers
        end = len(data) - len(body)
        if not (
            0 < end <= LONGEST_HEAD
            and data.find(BLANK) + len(BLANK) == end
            # A parser that takes lone ends of lines for ends of lines may have found the blank line elsewhere.
            and data.count(b"\n", 0, end) == data.count(b"\r", 0, end) == data.count(b"\r\n", 0, end)
            and data.endswith(body)
            and headers.keys().isdisjoint(_NEVER)
        ):
            return
        if len(self) >= _MOST_HEADS:
            self.clear()
        self[data[:end]] = RequestHead(exchange.method, exchange.url, headers, len(body))
