"""A cache of request heads: clients that keep a connection send the same head again and again.

A cached head has passed the parser and all checks, and has the same meaning whenever the same bytes arrive, up to and
including the blank line. It is used only if exactly one whole request has arrived; everything else is parsed.
"""

from __future__ import annotations

from meshwright.serving.server.exchange import HttpExchange

# Larger heads are parsed each time; when the cache has this number of heads, it is cleared.
LONGEST_HEAD, _MOST_HEADS = 2048, 1024
BLANK = b"\r\n\r\n"
# Requests with these headers go through several states, or have heads that never recur.
_NEVER = frozenset((b"transfer-encoding", b"expect", b"traceparent"))


class RequestHead:
    """The parsed head of a request; ``length`` is the length of its body in bytes."""

    __slots__ = ("headers", "length", "method", "url")

    def __init__(self, method: bytes, url: bytes, headers: dict[bytes, bytes], length: int) -> None:
        self.method, self.url, self.headers, self.length = method, url, headers, length


class Heads(dict[bytes, RequestHead]):
    """A cache of parsed request heads, by their bytes."""

    def learn(self, data: bytes, exchange: HttpExchange) -> None:
        """Cache the head of a request if ``data`` is exactly this request."""
        body, headers = exchange.body, exchange.headers
        end = len(data) - len(body)
        if not (
            0 < end <= LONGEST_HEAD
            and data.find(BLANK) + len(BLANK) == end
            # A parser that accepts single CR or LF as line ends may have found the blank line elsewhere.
            and data.count(b"\n", 0, end) == data.count(b"\r", 0, end) == data.count(b"\r\n", 0, end)
            and data.endswith(body)
            and headers.keys().isdisjoint(_NEVER)
        ):
            return
        if len(self) >= _MOST_HEADS:
            self.clear()
        self[data[:end]] = RequestHead(exchange.method, exchange.url, headers, len(body))
