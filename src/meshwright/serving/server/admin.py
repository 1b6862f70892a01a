"""The admin port of a server, at 127.0.0.1 only: it shows the server's state, and changes its models.

    GET /                       a page that shows the state (`dashboard`)
    GET /status                 totals, models and processes, as JSON
    GET /metrics                the same in Prometheus' text format
    GET /health                 200 while requests can be answered, 503 otherwise
    GET /timeline?seconds=2     a timeline of requests during the next seconds (`collecting`), for Perfetto
    POST /v2/repository/...     change the models (`repository`); needs the server's token, if the server has one

Each process of the server reports its state to the supervisor once a second (`reports`). This port answers from these
reports, so that requests to it do not slow down frontends, scheduler or workers.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from meshwright.report.page import SERVED_HEADERS
from meshwright.serving.policies.pool import NOMINAL
from meshwright.serving.server.collecting import LEAST_S, MOST_S, Busy, Collector, Ending
from meshwright.serving.server.counters import bucket_begin
from meshwright.serving.server.dashboard import read_asset
from meshwright.serving.server.repository import Repository
from meshwright.serving.server.served import Served
from meshwright.serving.server.supervisor import Supervisor
from meshwright.serving.server.tokens import is_bearer, read_token
from meshwright.serving.server.totals import NO_MODEL, ModelTotals
from meshwright.spec import ServingError

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
_HOST = "127.0.0.1"
_HOSTS = (b"127.0.0.1", b"localhost", b"[::1]")
_JSON = b"application/json"
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SERVED_HEADERS.items()]
_SECONDS = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?")
_MOST_BODY = 2**16
_REPOSITORY = "/v2/repository/"
# Bounds of the histogram, in buckets of `counters`: each doubling from 16 us to 34 s.
_BOUNDS = range(4 * 13, 4 * 35, 4)


async def serve_admin(supervisor: Supervisor, file: Path, token_file: Path | None = None) -> None:
    """Serve the admin port until the supervisor stops.

    ``file`` is the deployment file, which is read again when models change. ``token_file`` contains the token that
    changes require; None: no token. Raises ServingError if the port is in use.
    """
    token = None if token_file is None else read_token(token_file)
    listener = _listen(supervisor.deployment.server.admin_port)
    supervisor.admin_port = listener.getsockname()[1]
    config = uvicorn.Config(
        Door(supervisor, Repository(supervisor, file), token),
        log_level="warning",
        lifespan="off",
        access_log=False,
        ws="none",
    )
    server = uvicorn.Server(config)
    # Signals are handled by the supervisor.
    serving = asyncio.create_task(server._serve([listener]))
    await supervisor.stopped()
    server.should_exit = server.force_exit = True
    await serving


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
    except OSError as error:
        listener.close()
        raise ServingError(
            f"The admin server cannot listen at port {port}: {error.strerror}. Choose another one, or 0 for a free one."
        ) from None
    return listener


class Door:
    """The ASGI application of the admin port, and the source of its Prometheus metrics (`collect`)."""

    def __init__(self, supervisor: Supervisor, repository: Repository, token: str | None = None) -> None:
        self._supervisor, self._repository = supervisor, repository
        self._token = None if token is None else token.encode()
        self._collector = Collector(supervisor)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers, path = dict(scope["headers"]), scope["path"]
        if (refused := _refusal(scope["method"], path, headers)) is not None:
            await _answer(send, *refused)
        elif path.startswith(_REPOSITORY):
            # The undecoded path: a model's name may contain any character.
            asked = scope["raw_path"].decode("latin-1")
            code, document = await self._change(asked, headers, receive)
            await _answer(send, code, _JSON, json.dumps(document).encode())
        elif path == "/timeline":
            await self._record(scope, send)
        else:
            await _answer(send, *self._look_up(path))

    def _look_up(self, path: str) -> tuple[int, bytes, bytes]:
        if path == "/metrics":
            return 200, b"text/plain; version=0.0.4; charset=utf-8", generate_latest(self._registry)
        if path == "/status":
            return 200, _JSON, json.dumps(status_of(self._supervisor)).encode()
        if path == "/health":
            ready = self._supervisor.is_ready
            return (200 if ready else 503), _JSON, json.dumps({"ready": ready}).encode()
        asset = read_asset(path)
        if asset is not None:
            return 200, *asset
        return (
            404,
            _JSON,
            _error(
                "There is no page at this path; the pages are / (for people), /status, /metrics, /health and /timeline."
            ),
        )

    async def _record(self, scope: Message, send: Send) -> None:
        """Send a timeline, piece by piece; a HEAD request records nothing."""
        try:
            seconds = _read_seconds(scope["query_string"])
            pieces = iter(()) if scope["method"] == "HEAD" else await self._collector.collect(seconds)
        except ServingError as error:
            await _answer(send, 400, _JSON, _error(str(error)))
        except Busy as busy:
            sentence = "Another timeline is being recorded. Ask again when it is done."
            await _answer(send, 409, _JSON, _error(sentence), (b"retry-after", b"%d" % busy.seconds))
        except Ending:
            await _answer(send, 503, _JSON, _error("No timeline can be recorded: the server is starting or ending."))
        else:
            kept = (b"content-disposition", b'attachment; filename="timeline.json"')
            headers = [*_HEADERS, (b"content-type", _JSON), kept]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _change(
        self, path: str, headers: dict[bytes, bytes], receive: Callable[[], Awaitable[Message]]
    ) -> tuple[int, Any]:
        """Change the models, and answer."""
        # Some browsers reveal a foreign page only by this header.
        if b"origin" in headers:
            return 403, {"error": "Web pages cannot change the models. Send the request without an Origin header."}
        if self._token is not None and not is_bearer(headers.get(b"authorization", b""), self._token):
            return 401, {"error": "A change of models needs the server's token; expected Authorization: Bearer TOKEN."}
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return 400, {"error": "The connection was closed before the whole body had arrived."}
            body += message.get("body", b"")
            if len(body) > _MOST_BODY:
                return 413, {"error": f"The body has more than {_MOST_BODY} bytes; the request needs no body."}
            if not message.get("more_body"):
                return await self._repository.answer(path, body)

    def collect(self) -> Iterable[Metric]:
        """Yield all current metrics, for prometheus_client."""
        status = status_of(self._supervisor)
        answers = CounterMetricFamily(
            "meshwright_answers",
            "Answered requests by model and HTTP status (for gRPC, the equivalent HTTP status); the model is empty for "
            "requests that named no served model.",
            labels=["model", "status"],
        )
        seconds = HistogramMetricFamily(
            "meshwright_request_seconds",
            "Seconds from a request's first byte to its answer, of answers with status 200.",
            labels=["model"],
        )
        fates = CounterMetricFamily(
            "meshwright_samples",
            "Samples that the scheduler has answered, by outcome.",
            labels=["model", "fate"],
        )
        batches = CounterMetricFamily("meshwright_batches", "Batches that workers have run.", labels=["model"])
        for model in status["models"]:
            for code, count in model["statuses"].items():
                answers.add_metric([model["name"], code], count)
            for fate, count in model["fates"].items():
                fates.add_metric([model["name"], fate], count)
            batches.add_metric([model["name"]], model["num_batches"])
            seconds.add_metric([model["name"]], *_histogram(model["buckets"], model["latency_ns"]))
        for code, count in status["others"].items():
            answers.add_metric([NO_MODEL, code], count)
        yield from (answers, seconds, fates, batches)
        for name, text in (
            ("cancelled_requests", "Requests whose clients disconnected before they were answered."),
            ("refused_connections", "Client connections refused because the limit of connections was reached."),
        ):
            yield CounterMetricFamily(f"meshwright_{name}", text, value=status[name])
        for name, text, value in (
            ("ready", "1 while requests can be answered.", float(status["ready"])),
            ("queued_samples", "Samples that wait in queues.", status["queued"]),
            ("workers_up", "Workers that can run batches.", status["up"]),
            ("workers_idle", "Workers that can run batches and have no batch.", status["idle"]),
            ("connections", "Open client connections.", status["connections"]),
            ("slack_seconds", "Seconds before a deadline by which a batch must end.", status["slack_s"]),
            ("guard_seconds", "Seconds by which the policy is woken early, as timers fire late.", status["guard_s"]),
        ):
            yield GaugeMetricFamily(f"meshwright_{name}", text, value=value)
        starts = CounterMetricFamily("meshwright_process_starts", "Number of starts of a process.", labels=["process"])
        cpu = CounterMetricFamily("meshwright_process_cpu_seconds", "Processor time in seconds.", labels=["process"])
        memory = GaugeMetricFamily("meshwright_process_resident_bytes", "Resident memory in bytes.", labels=["process"])
        for process in status["processes"]:
            starts.add_metric([process["name"]], process["starts"])
            cpu.add_metric([process["name"]], process["cpu_s"])
            memory.add_metric([process["name"]], process["resident_bytes"])
        yield from (starts, cpu, memory)


async def _answer(send: Send, status: int, kind: bytes, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [*_HEADERS, (b"content-type", kind), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()


def _refusal(method: str, path: str, headers: dict[bytes, bytes]) -> tuple[int, bytes, bytes] | None:
    """Return why a request is refused, or None: a foreign web page has sent it, or the method is wrong."""
    host = headers.get(b"host", b"")
    # A foreign host name could otherwise resolve to this machine.
    if host not in _HOSTS and host.rpartition(b":")[0] not in _HOSTS:
        return 403, _JSON, _error("The admin port serves this machine only: ask for host 127.0.0.1 or localhost.")
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and path != "/":
        return 403, _JSON, _error("Web pages of other sites cannot use the admin port.")
    is_change = path.startswith(_REPOSITORY)
    if method not in (("POST",) if is_change else ("GET", "HEAD")):
        return (
            405,
            _JSON,
            _error("This path needs the method POST." if is_change else "This path needs the method GET."),
        )
    return None


def _read_seconds(query: bytes) -> float:
    """Return the seconds of a timeline. Raises ServingError."""
    given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    text = given[0][1] if given else "2"
    if [name for name, _ in given] not in ([], ["seconds"]) or not _SECONDS.fullmatch(text):
        raise ServingError("/timeline takes only the number of seconds to record, as in /timeline?seconds=2.")
    seconds = float(text)
    if not LEAST_S <= seconds <= MOST_S:
        raise ServingError(f"seconds is {seconds:g}; expected {LEAST_S:g} to {MOST_S:g}.")
    return seconds


def _histogram(buckets: dict[int, int], latency_ns: int) -> tuple[list[tuple[str, float]], float]:
    total, places, rows = 0, sorted(buckets), []
    for bound in _BOUNDS:
        total = sum(buckets[place] for place in places if place < bound)
        rows.append((f"{bucket_begin(bound) / 1e9:.6g}", float(total)))
    return [*rows, ("+Inf", float(sum(buckets.values())))], latency_ns / 1e9


def status_of(supervisor: Supervisor) -> dict[str, Any]:
    """Return the state of a server as the JSON document of ``/status``: totals, models and processes."""
    facts = supervisor.facts
    scheduler = facts.get("scheduler", {})
    fronts = [each for name, each in facts.items() if name.startswith("front-")]
    totals = copy.deepcopy(supervisor.ended)
    for each in facts.values():
        totals.add(each)
    return {
        "ready": supervisor.is_ready,
        "policy": supervisor.deployment.policy,
        "time_s": time.time(),
        "version": version("meshwright"),
        # When the counts of scheduler and frontends were reported.
        "scheduler_time_s": scheduler.get("time_ns", 0) / 1e9,
        "fronts_time_s": sum(front["time_ns"] for front in fronts) / max(len(fronts), 1) / 1e9,
        "devices": supervisor.deployment.devices,
        **{name: scheduler.get(name, 0) for name in ("queued", "up", "idle")},
        **{f"{name}_s": scheduler.get(f"{name}_ns", 0) / 1e9 for name in ("delay", "notice", "slack", "guard")},
        "stretch": scheduler.get("stretch", NOMINAL) / NOMINAL,
        "connections": sum(front.get("connections", 0) for front in fronts),
        "cancelled_requests": totals.cancelled,
        "refused_connections": totals.refused,
        # Answers without a model, by status.
        "others": dict(totals.models[NO_MODEL].statuses),
        "models": [_model(served, totals.models[served.name]) for served in supervisor.models],
        "processes": [
            {"name": name, "pid": pid, "starts": supervisor.starts(name), **_usage(pid)}
            for name, pid in {"supervisor": os.getpid(), **supervisor.process_ids()}.items()
        ],
    }


def _model(served: Served, totals: ModelTotals) -> dict[str, Any]:
    return {
        "name": served.name,
        "version": served.version,
        "slo_s": served.slo_ns / 1e9,
        "statuses": dict(totals.statuses),
        "fates": dict(totals.fates),
        "num_batches": totals.num_batches,
        "buckets": dict(totals.buckets),
        "latency_ns": totals.latency_ns,
    }


def _usage(pid: int) -> dict[str, Any]:
    """Return processor seconds and bytes of memory of a process from Linux's proc(5); zeros if it has just ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError):
        return {"cpu_s": 0.0, "resident_bytes": 0}
    if not hasattr(os, "sysconf"):
        return {"cpu_s": 0.0, "resident_bytes": 0}
    ticks = int(fields[11]) + int(fields[12])
    return {"cpu_s": ticks / os.sysconf("SC_CLK_TCK"), "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
