"""HTTP routes of a frontend, independent of the connections (`http`).

    GET   /v2 · /v2/health/live · /v2/health/ready · /openapi.json
    GET   /v2/models/M[/versions/V][/ready]
    POST  /v2/models/M[/versions/V]/infer · /v2/repository/index

Answers with status 503 have the header ``Retry-After``. A valid ``traceparent`` (W3C) gets a ``traceresponse``; an
invalid one is ignored, as the standard says. With a token, all paths except health require ``Authorization: Bearer
TOKEN``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from meshwright.serving.server.answers import (
    BINARY,
    JSON,
    RETRY,
    NotCompressed,
    ResponseWriter,
    TooLarge,
    compress,
    decompress,
    error_body,
)
from meshwright.serving.server.exchange import HttpExchange, Refusal, check_method, path_of, read_integer, show
from meshwright.serving.server.front import Frontend, FrontendModel
from meshwright.serving.server.gate import ModelFacts, Ticket
from meshwright.serving.server.tensors import ParsedRequest
from meshwright.serving.server.trace_context import read_context
from meshwright.serving.server.values import SHOWN, BadRequest
from meshwright.spec import Server

_READ, _WRITE = b"GET, HEAD", b"POST"
# Header lines that go with a status.
_FIELDS = {503: RETRY, 401: b'WWW-Authenticate: Bearer realm="meshwright"\r\n'}


class Paths:
    """Answers HTTP requests by their path, for one frontend; the routes are listed at the top of the module."""

    def __init__(self, front: Frontend) -> None:
        self.answers = ResponseWriter()
        self._front, self._gate = front, front.gate
        self._has_token = front.has_token
        self._known: dict[str, ModelFacts] | None = None
        self._infer_paths: dict[bytes, FrontendModel] = {}
        self._openapi = _openapi(front.server)

    def begin(self, exchange: HttpExchange) -> None:
        """Answer a request at once, or submit it to the scheduler; `Asker.settle` is called with the answer."""
        if self._gate.models is not self._known:
            self._learn()
        served = self._infer_paths.get(exchange.url)
        try:
            if self._has_token or b"traceparent" in exchange.headers:
                self._read_headers(exchange)
            if served is not None and exchange.method == b"POST":
                self._infer(exchange, served)
            else:
                self._route(exchange)
        except Exception as error:
            self.refuse(exchange, self._front.refusal_of(error))

    def refuse(self, exchange: HttpExchange, refusal: Refusal) -> None:
        """Send an error answer."""
        status = refusal.status
        self._give(exchange, status, error_body(refusal.sentence), refusal.fields or _FIELDS.get(status, b""))

    # --- inference ----------------------------------------------------------------------------

    def _infer(self, exchange: HttpExchange, served: FrontendModel) -> None:
        exchange.served = served
        front, codec, headers = self._front, served.codec, exchange.headers
        body = self._plain_body(exchange) if b"content-encoding" in headers else exchange.body
        length = headers.get(b"inference-header-content-length")
        asked = codec.decode(body, None if length is None else read_integer("Inference-Header-Content-Length", length))
        timeout_ns = served.model.slo_ns
        if asked.timeout_us is not None or b"x-request-timeout-ms" in headers:
            timeout_ns = front.timeout_ns(asked, headers.get(b"x-request-timeout-ms"))
        front.submit(exchange, served, asked, exchange.begun_ns + timeout_ns, partial(self._reply, exchange))
        exchange.body = b""
        exchange.owed = codec.answer_bytes * asked.count

    def _reply(self, exchange: HttpExchange, ticket: Ticket) -> None:
        """Handle the outcome of a request."""
        try:
            self._front.conclude(exchange, ticket, self._make_answer)
        except Exception as error:
            self.refuse(exchange, self._front.refusal_of(error))
        else:
            exchange.asker.settle(exchange)

    def _make_answer(
        self, exchange: HttpExchange, served: FrontendModel, asked: ParsedRequest, slots: list[int]
    ) -> None:
        body, json_bytes = served.codec.encode(asked, slots)
        fields, accepted = exchange.fields, exchange.headers.get(b"accept-encoding")
        if accepted is not None:
            body, coding = compress(body, accepted)
            fields += coding
        if json_bytes is None:
            exchange.answer = self.answers.done(body, fields)
        else:
            fields += b"Inference-Header-Content-Length: %d\r\n" % json_bytes
            exchange.answer = self.answers.make(200, body, fields, BINARY)

    def _plain_body(self, exchange: HttpExchange) -> bytes:
        coding = exchange.headers.get(b"content-encoding")
        if coding is None:
            return exchange.body
        try:
            return decompress(exchange.body, coding, self._front.server.body_bytes)
        except KeyError:
            raise Refusal(
                415,
                f"The body's Content-Encoding is {show(coding)!r}; expected gzip or deflate, or none.",
                b"Accept-Encoding: gzip, deflate\r\n",
            ) from None
        except TooLarge:
            raise Refusal(
                413, f"The body has more than {self._front.server.body_bytes} bytes when it is decompressed; send less."
            ) from None
        except NotCompressed as error:
            raise BadRequest(f"The body is not compressed as {show(coding)}: {error}.") from None

    # --- everything else ----------------------------------------------------------------------

    def _route(self, exchange: HttpExchange) -> None:
        """Answer a request other than inference by its usual path."""
        path = path_of(exchange.url)
        parts = [unquote(part) for part in path.split("/")[1:]]
        match parts:
            case ["v2"]:
                self._show(exchange, self._front.metadata())
            case ["openapi.json"]:
                self._show(exchange, self._openapi)
            case ["v2", "health", "live"]:
                self._show(exchange, {"live": True})
            case ["v2", "health", "ready"]:
                self._show_ready(exchange, {})
            case ["v2", "repository", "index"]:
                check_method(exchange, _WRITE)
                self._show_index(exchange)
            case ["v2", "repository", *_]:
                raise Refusal(404, "Load and unload models at the admin address, which `meshwright serve` prints.")
            case ["v2", "models", name, *rest]:
                number = None
                if rest[:1] == ["versions"] and len(rest) > 1:
                    number, rest = rest[1], rest[2:]
                if rest not in ([], ["ready"], ["infer"]):
                    raise _no_path(path)
                check_method(exchange, _WRITE if rest == ["infer"] else _READ)
                served = self._front.find(name, number)
                if rest == ["infer"]:
                    self._infer(exchange, served)
                elif rest:
                    self._show_ready(exchange, {"name": name})
                else:
                    self._show(exchange, served.metadata())
            case _:
                raise _no_path(path)

    def _show(self, exchange: HttpExchange, document: Any, status: int = 200) -> None:
        check_method(exchange, _READ)
        self._give(exchange, status, document if isinstance(document, bytes) else msgspec.json.encode(document))

    def _show_ready(self, exchange: HttpExchange, document: dict[str, Any]) -> None:
        is_ready = self._front.is_ready
        self._show(exchange, {**document, "ready": is_ready}, 200 if is_ready else 503)

    def _show_index(self, exchange: HttpExchange) -> None:
        """Send the list of models in Triton's form; with ``ready`` only ready ones."""
        body = self._plain_body(exchange)
        try:
            asked = msgspec.json.decode(body, type=_IndexRequest) if body else _IndexRequest()
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise BadRequest(
                f'The body is not an index request: {str(error)[: 4 * SHOWN]}. Send {{"ready": true}} or nothing.'
            ) from None
        self._give(exchange, 200, msgspec.json.encode(self._front.index(asked.ready)))

    def _give(self, exchange: HttpExchange, status: int, body: bytes, fields: bytes = b"") -> None:
        """Send an answer that does not come from the model."""
        self._front.note(exchange, status)
        answer = self.answers.make(status, body, exchange.fields + fields, JSON)
        exchange.answer = answer[: len(answer) - len(body)] if exchange.method == b"HEAD" else answer
        exchange.asker.settle(exchange)

    def _read_headers(self, exchange: HttpExchange) -> None:
        """Handle the headers common to all requests: token and trace context."""
        headers = exchange.headers
        parent = headers.get(b"traceparent")
        if parent is not None:
            exchange.trace = trace = read_context(parent, headers.get(b"tracestate", b""))
            if trace is not None:
                exchange.fields += b"traceresponse: " + trace.response + b"\r\n"
        if self._has_token and not path_of(exchange.url).startswith("/v2/health/"):
            self._front.check_token(headers.get(b"authorization", b""))

    def _learn(self) -> None:
        """Update the inference paths after the models have changed."""
        served = self._front.served()
        self._infer_paths = {}
        for name, each in served.items():
            path = f"/v2/models/{quote(name, safe='')}"
            for infer in (f"{path}/infer", f"{path}/versions/{quote(each.model.version, safe='')}/infer"):
                self._infer_paths[infer.encode()] = each
        self._known = self._gate.models


def _openapi(server: Server) -> bytes:
    """Return the OpenAPI document, with this server's deadline limit."""
    document = msgspec.json.decode(Path(__file__).with_name("openapi.json").read_bytes())
    parts = document["components"]
    parts["parameters"]["timeout"]["schema"]["maximum"] = int(server.longest_deadline * 1e3)
    timeout = parts["schemas"]["InferRequest"]["properties"]["parameters"]["properties"]["timeout"]
    timeout["maximum"] = int(server.longest_deadline * 1e6)
    return msgspec.json.encode(document)


class _IndexRequest(msgspec.Struct):
    ready: bool = False


def _no_path(path: str) -> Refusal:
    return Refusal(404, f"There is no path {path[:SHOWN]!r}; GET /openapi.json lists the paths.")
