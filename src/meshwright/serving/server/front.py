"""What a front answers: the Open Inference Protocol's paths, without the connections on which requests come (`http`).

    GET   /v2 · /v2/health/live · /v2/health/ready · /openapi.json
    GET   /v2/models/M[/versions/V][/ready]
    POST  /v2/models/M[/versions/V]/infer · /v2/repository/index

A request's deadline is its first byte's moment and the time that it asks for: the parameter ``timeout`` (microseconds),
or the header ``X-Request-Timeout-Ms`` (milliseconds), the shorter of both; without either, the model's SLO. More than
``Server.longest_deadline`` is refused. A request that cannot be met is answered 503, with ``Retry-After``.

A valid ``traceparent`` (W3C) is kept and sent back; one that is not is ignored, as the standard says. With a token, all
but the health paths want ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import msgspec

from meshwright.serving.server.answers import (
    BINARY,
    JSON,
    RETRY,
    Answers,
    NotCompressed,
    TooLarge,
    compress,
    decompress,
    error_body,
)
from meshwright.serving.server.counters import Counts, FrontCounts
from meshwright.serving.server.gate import Fate, Gate, ModelFacts, Ticket
from meshwright.serving.server.tensors import Asked, BadRequest, Codec, NotFinite
from meshwright.spec import Server

_LOG = logging.getLogger(__name__)
# Names of headers that are looked at; all others are passed over.
WANTED = frozenset(
    {
        *(b"host", b"connection", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"),
        *(b"accept-encoding", b"authorization", b"traceparent", b"x-request-timeout-ms"),
        b"inference-header-content-length",
    }
)
# Those of them that may come several times, as one list.
LISTS = frozenset((b"connection", b"transfer-encoding", b"content-encoding", b"accept-encoding", b"traceparent"))
_TRACE = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_FATES = {
    Fate.LATE: "The request cannot be answered by its deadline. Give it more time, or send less.",
    Fate.FULL: "The model's queue is full. Try again later.",
    Fate.CROWDED: "What waits before the request takes longer than its deadline allows. Try again later.",
    Fate.SACRIFICED: "The request was dropped, so that others are answered in time. Try again later.",
    Fate.CANCELLED: "The request was given up.",
    Fate.LOST: "What the request waited for was started anew. Try again.",
    Fate.FAILED: "The model failed on this request.",
}
_NO_ROOM = "There is no room for this request's tensors, as others are being answered. Try again later."
_NOT_READY = "The server is not ready. Try again later."
_READ, _WRITE = b"GET, HEAD", b"POST"
# The Open Inference Protocol's metadata name extensions; this is Triton's, for tensors as binary.
_EXTENSIONS = ["binary_tensor_data"]
_MOST_DIGITS = 15
_SHOWN = 80


class Asker(Protocol):
    """Whoever a request came from, as far as its answer needs it."""

    def settle(self, exchange: Exchange) -> None:
        """The answer is there."""


class Refusal(Exception):  # noqa: N818 - it is an answer
    """An answer that says what is wrong with a request."""

    def __init__(self, status: int, sentence: str, fields: bytes = b"") -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.fields = status, sentence, fields


class Exchange:
    """A request, and its answer once it is there."""

    __slots__ = (
        *("answer", "asked", "asker", "begun_ns", "body", "closes", "fields", "has_left", "headers", "method", "owed"),
        *("served", "ticket", "url"),
    )

    def __init__(
        self, asker: Asker, method: bytes, url: bytes, headers: dict[bytes, bytes], body: bytes, begun_ns: int
    ) -> None:
        self.asker, self.method, self.url, self.headers, self.body = asker, method, url, headers, body
        self.begun_ns = begun_ns
        # Is the connection closed after the answer, which has been sent; lines of its head that do not depend on it.
        self.closes, self.has_left, self.fields = False, False, b""
        self.answer: bytes | None = None
        self.asked: Asked | None = None
        self.served: Served | None = None
        self.ticket: Ticket | None = None
        # What it costs a connection to have this under way, about the bytes of the answer.
        self.owed = 0


class Served:
    """A model as a front serves it."""

    def __init__(self, model: ModelFacts, counts: Counts) -> None:
        self.model, self.counts, self.codec = model, counts, Codec(model)

    def metadata(self) -> dict[str, Any]:
        """What the protocol tells of a model."""
        model = self.model
        tensors = {
            name: [
                {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]} for tensor in tensors
            ]
            for name, tensors in (("inputs", model.inputs), ("outputs", model.outputs))
        }
        return {"name": model.name, "versions": [model.version], "platform": model.platform, **tensors}


class Front:
    """See the module's docstring. ``counts`` are for metrics; with ``is_draining`` it is no longer ready."""

    def __init__(self, gate: Gate, server: Server, token: str | None = None) -> None:
        self.gate, self.server = gate, server
        self.answers, self.counts = Answers(), FrontCounts()
        self.is_draining = False
        self._token = None if token is None else b"Bearer " + token.encode()
        self._longest_ns = round(server.longest_deadline * 1e9)
        self._known: dict[str, ModelFacts] | None = None
        self._served: dict[str, Served] = {}
        self._infer_paths: dict[bytes, Served] = {}
        self._openapi = Path(__file__).with_name("openapi.json").read_bytes()

    def begin(self, exchange: Exchange) -> None:
        """Answer a request at once, or have it answered (`Asker.settle`)."""
        if self.gate.models is not self._known:
            self._learn()
        served = self._infer_paths.get(exchange.url)
        try:
            if exchange.headers:
                self._read_headers(exchange)
            if served is not None and exchange.method == b"POST":
                self._infer(exchange, served)
            else:
                self._route(exchange)
        except BadRequest as error:
            self.refuse(exchange, Refusal(400, str(error)))
        except Refusal as refusal:
            self.refuse(exchange, refusal)
        except Exception:
            _LOG.exception("A request could not be answered.")
            self.refuse(exchange, Refusal(500, "The server failed on this request; its log says why."))

    def refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """Answer what is wrong with a request."""
        self._give(exchange, refusal.status, error_body(refusal.sentence), refusal.fields)

    def give_up(self, exchange: Exchange) -> None:
        """Nobody waits for this answer any more."""
        if exchange.ticket is not None:
            self.counts.cancelled += 1
            self.gate.cancel(exchange.ticket)

    # --- inference ----------------------------------------------------------------------------

    def _infer(self, exchange: Exchange, served: Served) -> None:
        exchange.served = served
        gate, model, codec, headers = self.gate, served.model, served.codec, exchange.headers
        if not gate.is_ready:
            raise Refusal(503, _NOT_READY, RETRY)
        body = self._plain_body(exchange)
        length = headers.get(b"inference-header-content-length")
        asked = codec.decode(body, None if length is None else _read_integer("Inference-Header-Content-Length", length))
        timeout_ns = model.slo_ns
        if asked.timeout_us is not None or b"x-request-timeout-ms" in headers:
            timeout_ns = self._timeout_ns(asked, headers)
        slots = gate.reserve(model, asked.count)
        if slots is None:
            raise Refusal(503, _NO_ROOM, RETRY)
        try:
            codec.write(asked, slots)
        except BaseException:
            model.idle += slots
            raise
        # What came is in the slots.
        exchange.body, asked.values = b"", []
        exchange.asked = asked
        exchange.owed = codec.answer_bytes * asked.count
        exchange.ticket = gate.submit(model, slots, exchange.begun_ns + timeout_ns, partial(self._reply, exchange))

    def _reply(self, exchange: Exchange, ticket: Ticket) -> None:
        """The scheduler has told what became of a request."""
        # The ticket holds this call, and so the exchange.
        exchange.ticket = None
        try:
            self._tell(exchange, ticket)
        except NotFinite as error:
            self.refuse(exchange, Refusal(500, str(error)))
        except Exception:
            _LOG.exception("A request could not be answered.")
            self.refuse(exchange, Refusal(500, "The server failed on this request; its log says why."))
        finally:
            self.gate.release(ticket)

    def _tell(self, exchange: Exchange, ticket: Ticket) -> None:
        served, asked, fate = exchange.served, exchange.asked, ticket.fate
        assert served is not None
        assert asked is not None
        served.counts.fates[fate] += 1
        if fate != Fate.DONE:
            self.refuse(
                exchange, Refusal(500, _FATES[fate]) if fate == Fate.FAILED else Refusal(503, _FATES[fate], RETRY)
            )
            return
        body, json_bytes = served.codec.encode(asked, ticket.slots)
        fields, accepted = exchange.fields, exchange.headers.get(b"accept-encoding")
        if accepted is not None:
            body, coding = compress(body, accepted)
            fields += coding
        if json_bytes is None:
            exchange.answer = self.answers.done(body, fields)
        else:
            fields += b"Inference-Header-Content-Length: %d\r\n" % json_bytes
            exchange.answer = self.answers.make(200, body, fields, BINARY)
        served.counts.note_done(time.monotonic_ns() - exchange.begun_ns, asked.count)
        exchange.asker.settle(exchange)

    def _timeout_ns(self, asked: Asked, headers: dict[bytes, bytes]) -> int:
        """How long a request may take that says so itself."""
        limits = [] if asked.timeout_us is None else [asked.timeout_us * 1000]
        milliseconds = headers.get(b"x-request-timeout-ms")
        if milliseconds is not None:
            limits.append(_read_integer("X-Request-Timeout-Ms", milliseconds, least=1) * 1_000_000)
        if min(limits) > self._longest_ns:
            raise Refusal(
                400,
                f"The request asks for {min(limits) / 1e9:.6g} s; expected {self._longest_ns / 1e9:g} s at most.",
            )
        return min(limits)

    def _plain_body(self, exchange: Exchange) -> bytes:
        coding = exchange.headers.get(b"content-encoding")
        if coding is None:
            return exchange.body
        try:
            return decompress(exchange.body, coding, self.server.body_bytes)
        except KeyError:
            raise Refusal(
                415,
                f"The body's Content-Encoding is {_shown(coding)!r}; expected gzip or deflate, or none.",
                b"Accept-Encoding: gzip, deflate\r\n",
            ) from None
        except TooLarge:
            raise Refusal(
                413, f"The body has more than {self.server.body_bytes} bytes when it is decompressed; send less."
            ) from None
        except NotCompressed as error:
            raise BadRequest(f"The body is not compressed as {_shown(coding)}: {error}.") from None

    # --- everything else ----------------------------------------------------------------------

    def _route(self, exchange: Exchange) -> None:
        """Answer what is no inference, or is one by an unusual name."""
        path = _path(exchange.url)
        parts = [unquote(part) for part in path.split("/")[1:]]
        match parts:
            case ["v2"]:
                self._show(
                    exchange, {"name": "meshwright", "version": version("meshwright"), "extensions": _EXTENSIONS}
                )
            case ["openapi.json"]:
                self._show(exchange, self._openapi)
            case ["v2", "health", "live"]:
                self._show(exchange, {"live": True})
            case ["v2", "health", "ready"]:
                self._show_ready(exchange, {})
            case ["v2", "repository", "index"]:
                _check_method(exchange, _WRITE)
                self._show_index(exchange)
            case ["v2", "models", name, *rest]:
                number = None
                if rest[:1] == ["versions"] and len(rest) > 1:
                    number, rest = rest[1], rest[2:]
                if rest not in ([], ["ready"], ["infer"]):
                    raise _no_path(path)
                _check_method(exchange, _WRITE if rest == ["infer"] else _READ)
                served = self._find(name, number)
                if rest == ["infer"]:
                    self._infer(exchange, served)
                elif rest:
                    self._show_ready(exchange, {"name": name})
                else:
                    self._show(exchange, served.metadata())
            case _:
                raise _no_path(path)

    def _find(self, name: str, number: str | None) -> Served:
        served = self._served.get(name)
        if served is None and not self.gate.is_ready:
            raise Refusal(503, _NOT_READY, RETRY)
        if served is None:
            raise Refusal(404, f"There is no model {name[:_SHOWN]!r}; POST /v2/repository/index tells what there is.")
        if number is not None and number != served.model.version:
            raise Refusal(
                404, f"Model {name!r} has no version {number[:_SHOWN]!r}; expected {served.model.version!r}, or none."
            )
        return served

    def _show(self, exchange: Exchange, document: Any, status: int = 200) -> None:
        _check_method(exchange, _READ)
        self._give(exchange, status, document if isinstance(document, bytes) else msgspec.json.encode(document))

    def _show_ready(self, exchange: Exchange, document: dict[str, Any]) -> None:
        is_ready = self.gate.is_ready and not self.is_draining
        self._show(exchange, {**document, "ready": is_ready}, 200 if is_ready else 503)

    def _show_index(self, exchange: Exchange) -> None:
        """What models there are, as Triton tells it; with ``ready`` only those that are."""
        body = self._plain_body(exchange)
        try:
            asked = msgspec.json.decode(body, type=_IndexRequest) if body else _IndexRequest()
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise BadRequest(
                f'The body is no request of the index: {str(error)[: 4 * _SHOWN]}. Send {{"ready": true}} or nothing.'
            ) from None
        is_ready = self.gate.is_ready and not self.is_draining
        state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", "the server is not ready")
        models = [
            {"name": served.model.name, "version": served.model.version, "state": state, "reason": reason}
            for served in self._served.values()
            if is_ready or not asked.ready
        ]
        self._give(exchange, 200, msgspec.json.encode(models))

    def _give(self, exchange: Exchange, status: int, body: bytes, fields: bytes = b"") -> None:
        """The answer of a request that did not come to the scheduler, or was not done by it."""
        counts = self.counts.others if exchange.served is None else exchange.served.counts
        counts.note(status)
        answer = self.answers.make(status, body, exchange.fields + fields, JSON)
        exchange.answer = answer[: len(answer) - len(body)] if exchange.method == b"HEAD" else answer
        exchange.asker.settle(exchange)

    def _read_headers(self, exchange: Exchange) -> None:
        """What concerns all requests: who may ask, and what is sent back."""
        headers = exchange.headers
        trace = headers.get(b"traceparent")
        if trace is not None:
            if _TRACE.fullmatch(trace) and (len(trace) == 55 or trace[:2] != b"00"):
                exchange.fields += b"traceparent: " + trace + b"\r\n"
            else:
                del headers[b"traceparent"]
        if self._token is not None and not _path(exchange.url).startswith("/v2/health/"):
            given = headers.get(b"authorization", b"")
            scheme, _, token = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(b"Bearer " + token.strip(), self._token):
                raise Refusal(
                    401,
                    "The request has no token that is valid here; expected Authorization: Bearer TOKEN.",
                    b'WWW-Authenticate: Bearer realm="meshwright"\r\n',
                )

    def _learn(self) -> None:
        """The gate knows other models than before."""
        known = self.gate.models
        same = {served.model: served for served in self._served.values()}
        self._served = {
            name: same.get(model) or Served(model, self.counts.of(model.name, model.version))
            for name, model in known.items()
        }
        self._infer_paths = {}
        for name, served in self._served.items():
            path = f"/v2/models/{quote(name, safe='')}"
            for each in (f"{path}/infer", f"{path}/versions/{quote(served.model.version, safe='')}/infer"):
                self._infer_paths[each.encode()] = served
        self._known = known


class _IndexRequest(msgspec.Struct):
    ready: bool = False


def _path(url: bytes) -> str:
    """The path of a request's target, which may also be a whole URL."""
    text = url.partition(b"?")[0].decode("latin-1")
    return text if text[:1] == "/" or "://" not in text else "/" + text.partition("://")[2].partition("/")[2]


def _no_path(path: str) -> Refusal:
    return Refusal(404, f"There is nothing at {path[:_SHOWN]!r}; GET /openapi.json tells what there is.")


def _check_method(exchange: Exchange, allowed: bytes) -> None:
    if exchange.method not in allowed.split(b", "):
        raise Refusal(
            405,
            f"{exchange.method.decode()} is not possible at this path; expected {allowed.decode()}.",
            b"Allow: " + allowed + b"\r\n",
        )


def _read_integer(name: str, text: bytes, least: int = 0) -> int:
    """The integer that a header is."""
    digits = text.strip()
    if not (digits.isdigit() and len(digits) <= _MOST_DIGITS and int(digits) >= least):
        raise BadRequest(f"{name} is {_shown(text)!r}; expected an integer, at least {least}.")
    return int(digits)


def _shown(text: bytes) -> str:
    return text[:_SHOWN].decode("latin-1")
