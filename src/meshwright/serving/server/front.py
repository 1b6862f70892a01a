"""How a frontend answers requests, the same for both protocols: `paths` for HTTP, `rpc` for gRPC.

A request's deadline is the moment at which it started to arrive plus its timeout. The timeout is the parameter
``timeout`` (microseconds) or the header ``X-Request-Timeout-Ms`` (milliseconds), the shorter of both; without either,
it is the model's SLO. A timeout of more than ``Server.longest_deadline`` is refused.

If not all requests of a model can be answered in time, those with a lower number as ``priority`` are preferred: 1 is
the most important priority, 7 or more the least important; 0, or no priority, is the same as 4.

A request with a valid ``traceparent`` (W3C) gets its own span, returned in ``traceresponse`` (`trace_context`). With a
token, all paths except health require ``Authorization: Bearer TOKEN``.

An error is a `Refusal`, with an HTTP status. A request that cannot be answered in time gets 503.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from meshwright.serving.server.counters import Counts, FrontCounts
from meshwright.serving.server.exchange import InboundRequest, Refusal, read_integer
from meshwright.serving.server.gate import Fate, Gate, ModelFacts, Ticket
from meshwright.serving.server.recording import Recording
from meshwright.serving.server.tensors import Codec, ParsedRequest
from meshwright.serving.server.tokens import is_bearer
from meshwright.serving.server.values import SHOWN, BadRequest, NotFinite
from meshwright.spec import Server

_LOG = logging.getLogger(__name__)
_FATES = {
    Fate.LATE: "The request cannot be answered by its deadline. Give it more time, or send less.",
    Fate.FULL: "The model's queue is full. Try again later.",
    Fate.CROWDED: "The work ahead of the request takes longer than its deadline allows. Try again later.",
    Fate.SACRIFICED: "The request was dropped, so that others are answered in time. Try again later.",
    Fate.CANCELLED: "The request was cancelled.",
    Fate.LOST: "A process that the request waited for was restarted. Try again.",
    Fate.FORGOTTEN: "The request got no answer until long after its deadline. Try again later.",
    Fate.FAILED: "The model failed on this request.",
}
_DONE = Fate.DONE
_now_ns = time.monotonic_ns
_NO_ROOM = "There is no memory for this request's tensors while others are being answered. Try again later."
_NOT_READY = "The server is not ready. Try again later."
# The Open Inference Protocol's metadata lists extensions; this one is Triton's, for binary tensors.
_EXTENSIONS = ["binary_tensor_data"]

_Call = TypeVar("_Call", bound=InboundRequest)


class FrontendModel:
    """A model as a frontend serves it: facts from the scheduler, counts of answers, and the codec of its tensors."""

    def __init__(self, model: ModelFacts, counts: Counts) -> None:
        self.model, self.counts, self.codec = model, counts, Codec(model)

    def metadata(self) -> dict[str, Any]:
        """Return the model's metadata in the form of the Open Inference Protocol."""
        model = self.model
        tensors = {
            name: [
                {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]} for tensor in tensors
            ]
            for name, tensors in (("inputs", model.inputs), ("outputs", model.outputs))
        }
        return {"name": model.name, "versions": [model.version], "platform": model.platform, **tensors}


class Frontend:
    """Answers the requests of both protocols in one frontend process, and counts its answers (``counts``).

    While ``is_draining`` is set, the frontend is ending, and reports that it is not ready.
    """

    def __init__(self, gate: Gate, server: Server, token: str | None = None) -> None:
        self.gate, self.server, self.counts = gate, server, FrontCounts()
        self.is_draining = False
        self.recording: Recording | None = None
        self.has_token = token is not None
        self._token = None if token is None else token.encode()
        self._longest_ns = round(server.longest_deadline * 1e9)
        self._known: dict[str, ModelFacts] | None = None
        self._served: dict[str, FrontendModel] = {}

    # --- inference ----------------------------------------------------------------------------

    def timeout_ns(self, asked: ParsedRequest, milliseconds: bytes | None) -> int:
        """Return the timeout (ns) of a request that has the parameter ``timeout``, X-Request-Timeout-Ms, or both.

        Raises Refusal if the timeout is longer than the server allows, and BadRequest for an invalid header.
        """
        limits = [] if asked.timeout_us is None else [asked.timeout_us * 1000]
        if milliseconds is not None:
            limits.append(read_integer("X-Request-Timeout-Ms", milliseconds, least=1) * 1_000_000)
        if min(limits) > self._longest_ns:
            raise Refusal(
                400,
                f"The request's timeout is {min(limits) / 1e9:.6g} s; expected {self._longest_ns / 1e9:g} s at most.",
            )
        return min(limits)

    def submit(
        self,
        call: InboundRequest,
        served: FrontendModel,
        asked: ParsedRequest,
        deadline_ns: int,
        reply: Callable[[Ticket], None],
    ) -> None:
        """Write a request's tensors into slots of shared memory, and submit the request to the scheduler.

        ``deadline_ns`` is a time of `time.monotonic_ns`. ``reply`` is called with the outcome, and has to call
        `conclude`. Raises Refusal if the server is not ready, or has no memory for the request.
        """
        gate, model = self.gate, served.model
        if not gate.is_ready:
            raise Refusal(503, _NOT_READY)
        slots = gate.reserve(model, asked.count)
        if slots is None:
            raise Refusal(503, _NO_ROOM)
        try:
            served.codec.write(asked, slots)
        except BaseException:
            model.idle += slots
            raise
        # The values are in the slots now.
        asked.values = ()
        call.asked = asked
        call.ticket = gate.submit(model, slots, deadline_ns, reply, asked.level)

    def conclude(
        self, call: _Call, ticket: Ticket, answer: Callable[[_Call, FrontendModel, ParsedRequest, list[int]], None]
    ) -> None:
        """Finish a request whose outcome is known, and free its slots.

        If the request was computed, ``answer`` is called with its slots, which contain the outputs. Raises Refusal for
        any other outcome.
        """
        # The ticket refers to the call, and so to the request: break the cycle.
        call.ticket = None
        served, asked, fate = call.served, call.asked, ticket.fate
        assert served is not None
        assert asked is not None
        status = 500
        try:
            if fate is not _DONE:
                status = 500 if fate == Fate.FAILED else 503
                raise Refusal(status, _FATES[fate])
            answer(call, served, asked, ticket.slots)
            served.counts.note_done(_now_ns() - call.begun_ns)
            status = 200
        finally:
            self.gate.release(ticket)
            if self.recording is not None:
                self.recording.rows_of_request(call, ticket, status, _now_ns())

    def refusal_of(self, error: Exception) -> Refusal:
        """Return the error answer for an exception; unexpected exceptions are logged."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, BadRequest):
            return Refusal(400, str(error))
        if isinstance(error, NotFinite):
            return Refusal(500, str(error))
        _LOG.error("A request could not be answered.", exc_info=error)
        return Refusal(500, "The server failed on this request; its log says why.")

    def note(self, call: InboundRequest, status: int) -> None:
        """Count an answer without outputs, such as an error."""
        counts = self.counts.others if call.served is None else call.served.counts
        counts.note(status)
        if self.recording is not None and call.asked is None:
            self.recording.rows_of_request(call, None, status, _now_ns())

    def give_up(self, call: InboundRequest) -> None:
        """Cancel a request whose client has disconnected."""
        if call.ticket is not None:
            self.counts.cancelled += 1
            if self.recording is not None:
                self.recording.rows_of_request(call, call.ticket, 0, _now_ns())
            self.gate.cancel(call.ticket)

    # --- everything else ----------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered, and the frontend is not ending."""
        return self.gate.is_ready and not self.is_draining

    def served(self) -> dict[str, FrontendModel]:
        """Return the models that are served now, by name."""
        known = self.gate.models
        if known is not self._known:
            same = {served.model: served for served in self._served.values()}
            self._served = {
                name: same.get(model) or FrontendModel(model, self.counts.of(model.name))
                for name, model in known.items()
            }
            self._known = known
        return self._served

    def find(self, name: str, number: str | None) -> FrontendModel:
        """Return a model by name and version ``number``; None stands for its only version.

        Raises Refusal if there is no such model or version.
        """
        served = self.served().get(name)
        if served is None:
            if not self.gate.is_ready:
                raise Refusal(503, _NOT_READY)
            raise Refusal(404, f"There is no model {name[:SHOWN]!r}; POST /v2/repository/index lists the models.")
        if number is not None and number != served.model.version:
            raise Refusal(
                404, f"Model {name!r} has no version {number[:SHOWN]!r}; expected {served.model.version!r}, or none."
            )
        return served

    def metadata(self) -> dict[str, Any]:
        """Return the server's metadata in the form of the Open Inference Protocol."""
        return {"name": "meshwright", "version": version("meshwright"), "extensions": _EXTENSIONS}

    def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Return the list of models in the form of Triton's repository index.

        With ``only_ready``, the list is empty while the server is not ready.
        """
        is_ready = self.is_ready
        state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", "the server is not ready")
        return [
            {"name": served.model.name, "version": served.model.version, "state": state, "reason": reason}
            for served in self.served().values()
            if is_ready or not only_ready
        ]

    def check_token(self, given: bytes) -> None:
        """Raise Refusal if the server has a token, and the header ``given`` is not ``Bearer TOKEN``."""
        if self._token is not None and not is_bearer(given, self._token):
            raise Refusal(401, "The request has no valid token; expected the header Authorization: Bearer TOKEN.")
