"""What a front answers: the Open Inference Protocol's paths, without the connections on which requests come (`http`).

    GET   /v2 · /v2/health/live · /v2/health/ready · /openapi.json
    GET   /v2/models/M[/versions/V][/ready]
    POST  /v2/models/M[/versions/V]/infer · /v2/repository/index

A request's deadline is its first byte's moment and the time that it asks for: the parameter ``timeout`` (microseconds),
or the header ``X-Request-Timeout-Ms`` (milliseconds), the shorter of both; without either, the model's SLO. More than
``Server.longest_deadline`` is refused. A request that cannot be met is answered 503, with ``Retry-After``.

A request with a valid ``traceparent`` (W3C) gets a span of its own, told in ``traceresponse`` (`trace_context`). With a
token, all but the health paths want ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import hmac
import logging
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
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
from meshwright.serving.server.exchange import Exchange, Refusal, check_method, path_of, read_integer, show
from meshwright.serving.server.gate import Fate, Gate, ModelFacts, Ticket
from meshwright.serving.server.recording import Recording
from meshwright.serving.server.tensors import Asked, Codec
from meshwright.serving.server.trace_context import read_context
from meshwright.serving.server.values import SHOWN, BadRequest, NotFinite
from meshwright.spec import Server

_LOG = logging.getLogger(__name__)
_FATES = {
    Fate.LATE: "The request cannot be answered by its deadline. Give it more time, or send less.",
    Fate.FULL: "The model's queue is full. Try again later.",
    Fate.CROWDED: "What waits before the request takes longer than its deadline allows. Try again later.",
    Fate.SACRIFICED: "The request was dropped, so that others are answered in time. Try again later.",
    Fate.CANCELLED: "The request was given up.",
    Fate.LOST: "What the request waited for was started anew. Try again.",
    Fate.FAILED: "The model failed on this request.",
}
_DONE = Fate.DONE
_NO_ROOM = "There is no room for this request's tensors, as others are being answered. Try again later."
_NOT_READY = "The server is not ready. Try again later."
_READ, _WRITE = b"GET, HEAD", b"POST"
# The Open Inference Protocol's metadata name extensions; this is Triton's, for tensors as binary.
_EXTENSIONS = ["binary_tensor_data"]


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
        self.recording: Recording | None = None
        self._token = None if token is None else b"Bearer " + token.encode()
        self._longest_ns = round(server.longest_deadline * 1e9)
        self._known: dict[str, ModelFacts] | None = None
        self._served: dict[str, Served] = {}
        self._infer_paths: dict[bytes, Served] = {}
        self._openapi = _openapi(server)

    def begin(self, exchange: Exchange) -> None:
        """Answer a request at once, or have it answered (`Asker.settle`)."""
        if self.gate.models is not self._known:
            self._learn()
        served = self._infer_paths.get(exchange.url)
        try:
            if self._token is not None or b"traceparent" in exchange.headers:
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
            if self.recording is not None:
                self.recording.rows_of_request(exchange, exchange.ticket, 0, time.monotonic_ns())
            self.gate.cancel(exchange.ticket)

    # --- inference ----------------------------------------------------------------------------

    def _infer(self, exchange: Exchange, served: Served) -> None:
        exchange.served = served
        gate, model, codec, headers = self.gate, served.model, served.codec, exchange.headers
        if not gate.is_ready:
            raise Refusal(503, _NOT_READY, RETRY)
        body = self._plain_body(exchange) if b"content-encoding" in headers else exchange.body
        length = headers.get(b"inference-header-content-length")
        asked = codec.decode(body, None if length is None else read_integer("Inference-Header-Content-Length", length))
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
        exchange.body, asked.values = b"", ()
        exchange.asked = asked
        exchange.owed = codec.answer_bytes * asked.count
        exchange.ticket = gate.submit(model, slots, exchange.begun_ns + timeout_ns, partial(self._reply, exchange))

    def _reply(self, exchange: Exchange, ticket: Ticket) -> None:
        """The scheduler has told what became of a request."""
        # The ticket holds this call, and so the exchange.
        exchange.ticket = None
        refusal = None
        try:
            self._make_answer(exchange, ticket)
        except Refusal as error:
            refusal = error
        except NotFinite as error:
            refusal = Refusal(500, str(error))
        except Exception:
            _LOG.exception("A request could not be answered.")
            refusal = Refusal(500, "The server failed on this request; its log says why.")
        finally:
            self.gate.release(ticket)
        # Only now, as requests that waited behind this one may need its slots.
        if refusal is None:
            exchange.asker.settle(exchange)
        else:
            self.refuse(exchange, refusal)
        if self.recording is not None:
            status = 200 if refusal is None else refusal.status
            self.recording.rows_of_request(exchange, ticket, status, time.monotonic_ns())

    def _make_answer(self, exchange: Exchange, ticket: Ticket) -> None:
        served, asked, fate = exchange.served, exchange.asked, ticket.fate
        assert served is not None
        assert asked is not None
        served.counts.fates[fate] += 1
        if fate is not _DONE:
            raise Refusal(500, _FATES[fate]) if fate == Fate.FAILED else Refusal(503, _FATES[fate], RETRY)
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

    def _timeout_ns(self, asked: Asked, headers: dict[bytes, bytes]) -> int:
        """How long a request may take that says so itself."""
        limits = [] if asked.timeout_us is None else [asked.timeout_us * 1000]
        milliseconds = headers.get(b"x-request-timeout-ms")
        if milliseconds is not None:
            limits.append(read_integer("X-Request-Timeout-Ms", milliseconds, least=1) * 1_000_000)
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
                f"The body's Content-Encoding is {show(coding)!r}; expected gzip or deflate, or none.",
                b"Accept-Encoding: gzip, deflate\r\n",
            ) from None
        except TooLarge:
            raise Refusal(
                413, f"The body has more than {self.server.body_bytes} bytes when it is decompressed; send less."
            ) from None
        except NotCompressed as error:
            raise BadRequest(f"The body is not compressed as {show(coding)}: {error}.") from None

    # --- everything else ----------------------------------------------------------------------

    def _route(self, exchange: Exchange) -> None:
        """Answer what is no inference, or is one by an unusual name."""
        path = path_of(exchange.url)
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
                check_method(exchange, _WRITE)
                self._show_index(exchange)
            case ["v2", "models", name, *rest]:
                number = None
                if rest[:1] == ["versions"] and len(rest) > 1:
                    number, rest = rest[1], rest[2:]
                if rest not in ([], ["ready"], ["infer"]):
                    raise _no_path(path)
                check_method(exchange, _WRITE if rest == ["infer"] else _READ)
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
            raise Refusal(404, f"There is no model {name[:SHOWN]!r}; POST /v2/repository/index tells what there is.")
        if number is not None and number != served.model.version:
            raise Refusal(
                404, f"Model {name!r} has no version {number[:SHOWN]!r}; expected {served.model.version!r}, or none."
            )
        return served

    def _show(self, exchange: Exchange, document: Any, status: int = 200) -> None:
        check_method(exchange, _READ)
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
                f'The body is no request of the index: {str(error)[: 4 * SHOWN]}. Send {{"ready": true}} or nothing.'
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
        if self.recording is not None and exchange.asked is None:
            self.recording.rows_of_request(exchange, None, status, time.monotonic_ns())
        answer = self.answers.make(status, body, exchange.fields + fields, JSON)
        exchange.answer = answer[: len(answer) - len(body)] if exchange.method == b"HEAD" else answer
        exchange.asker.settle(exchange)

    def _read_headers(self, exchange: Exchange) -> None:
        """What concerns all requests: who may ask, and what is sent back."""
        headers = exchange.headers
        parent = headers.get(b"traceparent")
        if parent is not None:
            exchange.trace = trace = read_context(parent, headers.get(b"tracestate", b""))
            if trace is not None:
                exchange.fields += trace.response
        if self._token is not None and not path_of(exchange.url).startswith("/v2/health/"):
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


def _openapi(server: Server) -> bytes:
    """The document of all this, with a server's limit."""
    document = msgspec.json.decode(Path(__file__).with_name("openapi.json").read_bytes())
    parts = document["components"]
    parts["parameters"]["timeout"]["schema"]["maximum"] = int(server.longest_deadline * 1e3)
    timeout = parts["schemas"]["InferRequest"]["properties"]["parameters"]["properties"]["timeout"]
    timeout["maximum"] = int(server.longest_deadline * 1e6)
    return msgspec.json.encode(document)


class _IndexRequest(msgspec.Struct):
    ready: bool = False


def _no_path(path: str) -> Refusal:
    return Refusal(404, f"There is nothing at {path[:SHOWN]!r}; GET /openapi.json tells what there is.")
