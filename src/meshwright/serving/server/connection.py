"""A client connection: HTTP/1.1 with keep-alive and pipelining, parsed by `httptools`. See `http` for its limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import httptools

from meshwright.serving.server.answers import RETRY
from meshwright.serving.server.exchange import LISTS, WANTED, HttpExchange, Refusal, show
from meshwright.serving.server.heads import BLANK, LONGEST_HEAD

if TYPE_CHECKING:
    from meshwright.serving.server.http import HttpServer

_LOG = logging.getLogger(__name__)
# Bytes that the parser gets at once if they may contain many requests.
_SLICE = 2**13
# The most a connection may have under way, in bytes of answers; each request counts as _EACH more.
_MOST_OWED, _EACH = 2**20, 2**14
# Unsent bytes at which requests are no longer read.
_MOST_UNSENT = 2**18
# How long data of the client is still read after the last answer, so that the client receives the answer.
_LINGER_NS = 2_000_000_000
_now_ns = time.monotonic_ns
_CONTINUE, _CLOSE = b"HTTP/1.1 100 Continue\r\n\r\n", b"Connection: close\r\n"


class Connection(asyncio.Protocol):
    """One client's connection: it parses requests, passes them to `Paths`, and sends answers in their order."""

    __slots__ = (
        *("_begun_ns", "_body", "_came", "_front", "_group", "_has_begun", "_header_bytes", "_headers", "_heads"),
        *("_held", "_is_going_on", "_is_lingering", "_is_over", "_is_paused", "_is_reading", "_left", "_most_body"),
        *("_most_header", "_owed", "_owes_continue", "_parser", "_parts", "_parts_bytes", "_quiet", "_server"),
        *("_paths", "_since_ns", "_size", "_stop", "_transport", "_unfed", "_url", "_waiting"),
    )

    def __init__(self, server: HttpServer) -> None:
        self._server, self._front, self._paths, self._heads = server, server.front, server.paths, server.heads
        self._most_header, self._most_body = server.limits.header_bytes, server.limits.body_bytes
        self._transport: Any = None
        self._parser: Any = httptools.HttpRequestParser(self)
        # Unanswered requests, in order; those of them that were not started; bytes that were not parsed.
        self._waiting: deque[HttpExchange] = deque()
        self._held: deque[HttpExchange] = deque()
        self._unfed: bytes | memoryview = b""
        self._owed = 0
        self._is_paused = self._is_going_on = False
        self._is_reading = True
        # No further requests are read, and received data is discarded; the reason, unless the client wished so.
        self._is_over = self._is_lingering = False
        self._stop: Refusal | None = None
        # Since when it has been idle, has lingered, or has waited for its client to read.
        self._since_ns = self._begun_ns = _now_ns()
        self._group: set[Connection] | None = None
        # The data that arrived in one piece, if a request started with it.
        self._came = b""
        # Bytes received since the last one that had a meaning.
        self._quiet = 0
        self._has_begun = self._owes_continue = False
        # The request that is being received; `_left` is its Content-Length, None before its headers are complete.
        self._url = self._body = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = self._size = self._parts_bytes = 0
        self._parts: list[bytes] = []
        self._left: int | None = None

    # --- called by the transport --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new connection."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=_MOST_UNSENT)
        self._group = self._server.join(self)
        if self._group is None:
            self._transport.abort()
        elif self._server.is_full:
            most = self._server.limits.connections
            self._end_early(
                Refusal(503, f"The server has {most} connections already, its limit. Try again later.", RETRY)
            )

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Handle the end of the connection."""
        self._is_over = True
        self._forget_body()
        for exchange in self._waiting:
            self._front.give_up(exchange)
        self._waiting.clear()
        self._held.clear()
        self._unfed = b""
        # The parser holds methods of this object: the cycle would delay freeing both.
        self._parser = None
        if self._group is not None:
            self._server.leave(self, self._group)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if self._is_over:
            return
        if not (self._has_begun or self._unfed or self._held):
            end = data.find(BLANK, 0, LONGEST_HEAD) + len(BLANK)
            head = self._heads.get(data[:end])
            if (
                head is not None
                and len(data) == end + head.length
                and not (self._is_paused or self._owed > _MOST_OWED or self._front.is_draining)
            ):
                self._quiet = 0
                exchange = HttpExchange(self, head.method, head.url, head.headers, data[end:], _now_ns())
                self._waiting.append(exchange)
                self._begin(exchange)
                return
            self._came = data
        if len(data) <= _SLICE and not self._unfed and not self._held:
            self._feed(data)
        else:
            self._unfed = memoryview(bytes(self._unfed) + data if self._unfed else data)
            self.go_on()
        self._came = b""
        if (self._held or self._unfed) and self._is_reading and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Note that the client does not read its answers."""
        self._is_paused, self._since_ns = True, _now_ns()

    def resume_writing(self) -> None:
        """Continue after the client has read its answers."""
        self._is_paused, self._since_ns = False, _now_ns()
        self.go_on()

    # --- called by the parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Handle the start of a request."""
        self._has_begun, self._begun_ns, self._quiet = True, _now_ns(), 0
        self._url = self._body = b""
        self._headers = {}
        self._header_bytes = self._size = 0
        self._left = None

    def on_url(self, url: bytes) -> None:
        """Store the URL of the request, or append a part of it."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header of the request if it is one of `WANTED`; ignore trailers, which follow the body."""
        self._header_bytes += len(name) + len(value) + 4
        if (name := name.lower()) in WANTED and self._left is None:
            before = self._headers.get(name)
            if before is not None:
                if name not in LISTS:
                    self._refuse(400, f"The request has two headers {name.decode()}; expected one.")
                value = before + b", " + value
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Check the complete headers; refuse a request that is too large, or uses what is not supported."""
        self._quiet = self._left = 0
        headers = self._headers
        if self._header_bytes + len(self._url) > self._most_header:
            self._refuse(431, f"The request line and headers are longer than {self._most_header} bytes; send less.")
        length = headers.get(b"content-length")
        if length is not None:
            self._left = int(length)
            if self._left > self._most_body:
                self._refuse(413, f"The body has {self._left} bytes; expected {self._most_body} at most.")
        elif (coding := headers.get(b"transfer-encoding")) is not None and coding.strip().lower() != b"chunked":
            self._refuse(501, f"The request's Transfer-Encoding is {show(coding)!r}; expected chunked, or none.")
        if b"host" not in headers and self._parser.get_http_version() == "1.1":
            self._refuse(400, "The request has no Host header; expected one, as HTTP/1.1 demands.")
        if self._parser.should_upgrade() and (self._left or b"transfer-encoding" in headers):
            self._refuse(400, "The request has a body and asks to switch to another protocol; expected HTTP/1.1.")
        expected = headers.get(b"expect")
        if expected is not None and self._parser.get_http_version() != "1.0":
            if expected.strip().lower() != b"100-continue":
                self._refuse(417, "The request's Expect header is unknown; expected 100-continue, or no such header.")
            self._owes_continue = True
            self._continue()

    def on_body(self, body: bytes) -> None:
        """Store the body of the request, or append a part of it."""
        self._quiet, self._owes_continue = 0, False
        self._size += len(body)
        if self._size > self._most_body:
            self._refuse(413, f"The body has more than {self._most_body} bytes; send less.")
        if not self._body:
            self._body = body
            return
        self._parts.append(body)
        self._parts_bytes += len(body)
        self._server.receiving_bytes += len(body)
        if self._server.receiving_bytes > self._server.most_receiving_bytes:
            self._refuse(503, "Bodies of other requests use all the memory for bodies. Try again later.", RETRY)

    def on_message_complete(self) -> None:
        """Handle a complete request."""
        if self._is_over:
            return
        self._quiet = 0
        self._has_begun = self._owes_continue = False
        body = self._body
        if self._parts:
            body = b"".join((body, *self._parts))
            self._forget_body()
        parser = self._parser
        exchange = HttpExchange(self, parser.get_method(), self._url, self._headers, body, self._begun_ns)
        self._body = b""
        if not parser.should_keep_alive() or self._front.is_draining:
            exchange.closes, exchange.fields, self._is_over = True, _CLOSE, True
        elif b"connection" in self._headers and parser.get_http_version() == "1.0":
            exchange.fields = b"Connection: keep-alive\r\n"
        elif self._left and self._came and not parser.should_upgrade():
            self._heads.learn(self._came, exchange)
        self._waiting.append(exchange)
        if self._held or self._is_paused or self._owed > _MOST_OWED:
            self._held.append(exchange)
        else:
            self._begin(exchange)

    # --- answers ------------------------------------------------------------------------------

    def settle(self, exchange: HttpExchange) -> None:
        """Send the answer of an exchange, once the answers of all earlier requests have been sent."""
        waiting = self._waiting
        if not waiting or waiting[0] is not exchange:
            return
        while waiting and (answer := waiting[0].answer) is not None:
            first = waiting.popleft()
            first.has_left = True
            self._owed -= first.owed
            self._transport.write(answer)
            if first.closes:
                # Closing while the client still sends would reset the connection, and it may never see the answer.
                self._close(lingers=True)
                return
        if not (waiting or self._is_paused):
            self._since_ns = _now_ns()
            if self._owes_continue:
                self._continue()
        if self._held or self._unfed:
            self.go_on()

    def go_on(self) -> None:
        """Continue with delayed requests and data, until too many answers are pending or unread again."""
        if self._is_going_on:
            return
        self._is_going_on = True
        try:
            while not self._is_blocked:
                if self._held:
                    self._begin(self._held.popleft())
                elif self._unfed and not self._is_over:
                    # Pass the rest of a body at once: it contains no further request.
                    size = max((self._left or 0) - self._size, _SLICE) if self._has_begun else _SLICE
                    part, self._unfed = self._unfed[:size], self._unfed[size:]
                    self._feed(part)
                else:
                    break
        finally:
            self._is_going_on = False
        if not (self._is_reading or self._held or self._unfed or self._transport.is_closing()):
            self._is_reading = True
            self._transport.resume_reading()

    def check(self, now_ns: int) -> None:
        """End the connection if it exceeds a time limit; called at intervals."""
        waited_ns, server = now_ns - self._since_ns, self._server
        if self._is_lingering:
            if waited_ns > _LINGER_NS:
                self._transport.abort()
        elif self._is_paused or (self._is_over and not self._waiting):
            # The client does not read what was sent.
            if waited_ns > server.idle_ns:
                self._transport.abort()
        elif self._is_over or self._unfed or self._held:
            return
        elif self._has_begun:
            if now_ns - self._begun_ns > server.receive_ns:
                self._end_early(
                    Refusal(408, f"The request has not arrived within {server.limits.receive:g} s; send it faster.")
                )
        elif not self._waiting and waited_ns > server.idle_ns:
            self._close()

    def finish(self) -> None:
        """Close as soon as pending requests are answered."""
        if self._has_begun or self._is_over:
            return  # closes by itself, or for another reason
        if self._waiting:
            last = self._waiting[-1]
            last.closes, last.fields, self._is_over = True, last.fields + _CLOSE, True
        else:
            self._close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    @property
    def _is_blocked(self) -> bool:
        """Whether further requests must wait until answers have been sent."""
        return self._is_paused or self._owed > _MOST_OWED

    def _begin(self, exchange: HttpExchange) -> None:
        self._paths.begin(exchange)
        if not exchange.has_left:
            answer = exchange.answer
            exchange.owed += _EACH if answer is None else _EACH + len(answer)
            self._owed += exchange.owed

    def _feed(self, data: bytes | memoryview) -> None:
        self._quiet += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # A request for another protocol may be ignored; the data after it is still HTTP/1.1.
            self._unfed = memoryview(bytes(data[upgrade.args[0] :]) + bytes(self._unfed))
            self.go_on()
        except httptools.HttpParserError as error:
            self._stop_at(error)
        else:
            if self._quiet > self._most_header and not self._is_over:
                self._end_early(
                    Refusal(431, f"The headers or trailers are longer than {self._most_header} bytes; send less.")
                )

    def _stop_at(self, error: httptools.HttpParserError) -> None:
        if self._is_over:
            return  # further data is ignored
        stop = self._stop
        if stop is None and isinstance(error, httptools.HttpParserCallbackError):
            _LOG.error("A request could not be read.", exc_info=error.__context__ or error)
            stop = Refusal(500, "The server failed on this request; its log says why.")
        self._end_early(stop or Refusal(400, f"The data is not an HTTP/1.1 request: {error}."))

    def _refuse(self, status: int, sentence: str, fields: bytes = b"") -> NoReturn:
        """Stop the parser from one of its callbacks; `_feed` continues after it."""
        self._stop = Refusal(status, sentence, fields)
        raise self._stop

    def _end_early(self, refusal: Refusal) -> None:
        """Read no further requests; answer the pending ones, then send this refusal."""
        self._stop, self._is_over, self._has_begun = refusal, True, False
        self._owes_continue = False
        self._forget_body()
        self._unfed = b""
        exchange = HttpExchange(self, b"", self._url, {}, b"", self._begun_ns)
        exchange.closes, exchange.fields = True, _CLOSE
        self._waiting.append(exchange)
        self._paths.refuse(exchange, refusal)

    def _close(self, *, lingers: bool = False) -> None:
        """Close the connection after its last answer."""
        self._is_over, self._since_ns = True, _now_ns()
        self._held.clear()
        if not lingers:
            self._transport.close()
            return
        self._is_lingering = True
        with contextlib.suppress(OSError, RuntimeError):  # gone already
            self._transport.write_eof()
            if not self._is_reading:
                self._is_reading = True
                self._transport.resume_reading()

    def _continue(self) -> None:
        """Ask the client to send its body, unless other answers must precede."""
        if not self._waiting:
            self._owes_continue = False
            self._transport.write(_CONTINUE)

    def _forget_body(self) -> None:
        self._server.receiving_bytes -= self._parts_bytes
        self._parts, self._parts_bytes, self._body = [], 0, b""
