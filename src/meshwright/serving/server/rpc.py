"""gRPC methods of a frontend: those of the Open Inference Protocol, as in `inference.proto`.

The HTTP statuses of `front` correspond to gRPC codes: 400 INVALID_ARGUMENT, 401 UNAUTHENTICATED, 404 NOT_FOUND,
408 ABORTED, 500 INTERNAL, 503 UNAVAILABLE, the last with ``retry-after`` in the trailing metadata. gRPC itself answers
RESOURCE_EXHAUSTED to messages of more than ``body_bytes`` and to more calls than ``connections``.

A gRPC deadline can shorten the deadline of its request, but never extends the model's SLO. ``x-request-timeout-ms``,
``authorization`` and ``traceparent`` are metadata with the same meaning as the HTTP headers; the response to
``traceparent`` is in the trailing metadata.

If a call is cancelled, by its client or because its connection ends, its request is cancelled, too. The message of a
call must arrive within ``receive`` seconds; to enforce this, all methods are stream methods that read one message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from meshwright.serving.server.exchange import InboundRequest, Refusal
from meshwright.serving.server.front import Frontend, FrontendModel
from meshwright.serving.server.gate import Ticket
from meshwright.serving.server.half_close import half_close
from meshwright.serving.server.messages import SERVICE_NAME, answer_of, asked_of, classes_of, read_infer, read_message
from meshwright.serving.server.tensors import ParsedRequest
from meshwright.serving.server.trace_context import read_context
from meshwright.serving.server.values import BadRequest
from meshwright.spec import Server

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.ABORTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
_RETRY = ("retry-after", "1")
_WITHOUT_TOKEN = ("ServerLive", "ServerReady")
# gRPC's largest message: a length of 32 bits.
_MOST_BYTES = 2**31 - 1
# Concurrent calls of one connection; the client queues further ones.
_MOST_STREAMS = 1024
# More frequent pings end a connection.
_PINGS_MS = 10_000
_OVERDUE = "overdue"
_ENDING = "The server is ending, and accepts no further requests; try again after a second."
# How often a shutdown checks whether all calls are answered.
_LOOK_S = 0.01
_now_ns = time.monotonic_ns


class RpcCall(InboundRequest):
    """An inference call, and its answer: a serialized message, or an exception."""

    answer: asyncio.Future[bytes | Exception] | None = None

    def __init__(self) -> None:
        self.begun_ns = _now_ns()


def most_connections(limits: Server) -> int:
    """Return the largest number of gRPC connections; one connection carries many calls."""
    return min(max(limits.connections // 8, 16), limits.connections)


class RpcServer:
    """The gRPC server of a frontend; made by `serve_rpc`."""

    def __init__(self, front: Frontend, limits: Server) -> None:
        self.port = 0
        self._front, self._receive_ns = front, round(limits.receive * 1e9)
        self._limits = limits
        self._server: Any = None
        # Calls whose messages have not arrived yet, and since when; the oldest first.
        self._receiving: dict[asyncio.Task[Any], int] = {}
        # Accepted inference calls; those refused during the shutdown are not included.
        self._under_way: set[RpcCall] = set()
        self._tick_s = min(limits.receive, 4.0) / 4
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int, reuse_port: bool) -> None:
        """Listen for connections."""
        limits, idle_ms = self._limits, round(self._limits.idle * 1e3)
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=limits.connections,
            options=[
                ("grpc.so_reuseport", int(reuse_port)),
                ("grpc.max_receive_message_length", min(limits.body_bytes, _MOST_BYTES)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", limits.header_bytes),
                ("grpc.absolute_max_metadata_size", limits.header_bytes),
                ("grpc.max_allowed_incoming_connections", most_connections(limits)),
                ("grpc.max_concurrent_streams", _MOST_STREAMS),
                ("grpc.max_connection_idle_ms", idle_ms),
                ("grpc.keepalive_time_ms", idle_ms),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", _PINGS_MS),
            ],
        )
        front = self._front
        answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": front.is_ready},
            "ServerMetadata": lambda _: front.metadata(),
            "ModelReady": self._tell_ready,
            "ModelMetadata": lambda asked: front.find(asked.name, asked.version or None).metadata(),
            "RepositoryIndex": lambda asked: {"models": front.index(asked.ready)},
        }
        methods: dict[str, Callable[..., Awaitable[bytes]]] = {
            name: partial(self._answer, name, *classes_of(name), answer) for name, answer in answers.items()
        }
        methods["ModelInfer"] = self._infer
        handlers = {name: grpc.stream_unary_rpc_method_handler(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        self.port = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        await self._server.start()
        self._tick()

    async def drain(self, grace_s: float) -> None:
        """Refuse further inference, answer pending calls, and close, at the latest after ``grace_s`` seconds.

        gRPC's own shutdown answers calls that arrive meanwhile with CANCELLED, as if their clients had cancelled them.
        Connections are half-closed first, so that these calls end with UNAVAILABLE instead.
        """
        self._front.is_draining = True
        end = time.monotonic() + grace_s
        while (self._under_way or await half_close(self.port)) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        await self._server.stop(max(end - time.monotonic(), 0.0))
        if self._timer is not None:
            self._timer.cancel()

    # --- inference ----------------------------------------------------------------------------

    async def _infer(self, _: Any, context: Any) -> bytes:
        call, front = RpcCall(), self._front
        try:
            headers = self._read_metadata("ModelInfer", call, context)
            if front.is_draining:
                raise Refusal(503, _ENDING)
            self._under_way.add(call)
            context.add_done_callback(partial(self._done, call))
            request = read_infer(await self._receive(context))
            call.served = served = front.find(request.model_name, request.model_version or None)
            asked = asked_of(served, request)
            timeout_ns, milliseconds = served.model.slo_ns, headers.get("x-request-timeout-ms")
            if asked.timeout_us is not None or milliseconds is not None:
                timeout_ns = front.timeout_ns(asked, None if milliseconds is None else _bytes_of(milliseconds))
            deadline_ns, left_s = call.begun_ns + timeout_ns, context.time_remaining()
            if left_s is not None:
                deadline_ns = min(deadline_ns, _now_ns() + int(left_s * 1e9))
            call.answer = asyncio.get_running_loop().create_future()
            front.submit(call, served, asked, deadline_ns, partial(self._reply, call))
            # The values are in the slots now.
            del request
            answer = await call.answer
            if isinstance(answer, Exception):
                raise answer
        except asyncio.CancelledError:
            front.give_up(call)
            raise
        except Exception as error:
            await self._refuse(call, context, error)
        return answer

    def _done(self, call: RpcCall, _: Any) -> None:
        """Note that the whole answer has been passed to the system."""
        self._under_way.discard(call)

    def _reply(self, call: RpcCall, ticket: Ticket) -> None:
        """Handle the outcome of a request."""
        assert call.answer is not None
        answer: bytes | Exception = b""

        def make(_: RpcCall, served: FrontendModel, asked: ParsedRequest, slots: list[int]) -> None:
            nonlocal answer
            answer = answer_of(served, asked, slots)

        try:
            self._front.conclude(call, ticket, make)
        except Exception as error:
            answer = error
        # Done already if the call was cancelled in this turn.
        if not call.answer.done():
            call.answer.set_result(answer)

    # --- everything else ----------------------------------------------------------------------

    async def _answer(
        self, name: str, asks: Any, answers: Any, answer: Callable[[Any], dict[str, Any]], _: Any, context: Any
    ) -> bytes:
        """Answer a method other than inference."""
        call = RpcCall()
        try:
            self._read_metadata(name, call, context)
            told: bytes = answers(**answer(read_message(asks, await self._receive(context)))).SerializeToString()
        except Exception as error:
            await self._refuse(call, context, error)
        self._front.note(call, 200)
        return told

    def _tell_ready(self, asked: Any) -> dict[str, Any]:
        """Answer ModelReady; like Triton, an unknown model is just not ready."""
        try:
            self._front.find(asked.name, asked.version or None)
        except Refusal:
            return {"ready": False}
        return {"ready": self._front.is_ready}

    def _read_metadata(self, method: str, call: RpcCall, context: Any) -> dict[str, str]:
        """Handle the metadata common to all calls: token and trace context. Raises Refusal."""
        headers = dict(context.invocation_metadata() or ())
        parent = headers.get("traceparent")
        if parent is not None:
            call.trace = trace = read_context(_bytes_of(parent), _bytes_of(headers.get("tracestate", "")))
            if trace is not None:
                context.set_trailing_metadata((("traceresponse", trace.response.decode()),))
        if self._front.has_token and method not in _WITHOUT_TOKEN:
            self._front.check_token(_bytes_of(headers.get("authorization", "")))
        return headers

    async def _receive(self, context: Any) -> bytes:
        """Read the message of a call. Raises BadRequest, Refusal."""
        task = asyncio.current_task()
        assert task is not None
        self._receiving[task] = _now_ns()
        try:
            message = await context.read()
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (_OVERDUE,):
                raise
            task.uncancel()
            raise Refusal(
                408, f"The request has not arrived within {self._limits.receive:g} s; send it faster."
            ) from None
        finally:
            del self._receiving[task]
        if not isinstance(message, bytes):
            raise BadRequest("The call has ended without a message; expected one message.")
        return message

    async def _refuse(self, call: RpcCall, context: Any, error: Exception) -> NoReturn:
        """Answer a call with an error."""
        refusal = self._front.refusal_of(error)
        self._front.note(call, refusal.status)
        fields = tuple(context.trailing_metadata() or ())
        await context.abort(
            _CODES[refusal.status], refusal.sentence, (*fields, _RETRY) if refusal.status == 503 else fields
        )
        raise AssertionError from error  # abort has raised

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        overdue_ns = _now_ns() - self._receive_ns
        for task, since_ns in self._receiving.items():
            if since_ns > overdue_ns:
                break
            task.cancel(_OVERDUE)


async def serve_rpc(front: Frontend, server: Server, *, port: int | None = None, reuse_port: bool = True) -> RpcServer:
    """Listen at the server's address, or at another port (0: a free one), and answer calls.

    Raises RuntimeError if listening fails.
    """
    rpc = RpcServer(front, server)
    await rpc.listen(server.host, server.grpc_port if port is None else port, reuse_port)
    return rpc


def _bytes_of(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1", "replace")
