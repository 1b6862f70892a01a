"""The admin door of a server: how it is, for people, programs and Prometheus; on this machine only.

    GET /status     what processes there are, and what each has reported, as JSON
    GET /metrics    the same in Prometheus' text format
    GET /health     200 while requests can be answered, 503 otherwise

Processes report each second (`reports`), so that asking costs them nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from meshwright.serving.server.counters import bucket_begin
from meshwright.serving.server.gate import Fate
from meshwright.serving.server.served import served_models
from meshwright.serving.server.supervisor import Supervisor
from meshwright.spec import ServingError

Message = MutableMapping[str, Any]
_HOST = "127.0.0.1"
# Bounds of the histogram, in buckets of `counters`: each doubling from 16 us to 34 s.
_BOUNDS = range(4 * 13, 4 * 35, 4)


async def serve_admin(supervisor: Supervisor) -> None:
    """Answer until the supervisor stops."""
    listener = _listen(supervisor.deployment.server.admin_port)
    supervisor.admin_port = listener.getsockname()[1]
    config = uvicorn.Config(Door(supervisor), log_level="warning", lifespan="off", access_log=False, ws="none")
    server = uvicorn.Server(config)
    # Signals are the supervisor's.
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
            f"The admin door cannot listen at port {port}: {error.strerror}. Choose another one, or 0 for a free one."
        ) from None
    return listener


class Door:
    """The ASGI application."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def __call__(
        self, scope: Message, _receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        status, kind, body = self._answer(scope["method"], scope["path"], dict(scope["headers"]).get(b"host", b""))
        headers = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, method: str, path: str, host: bytes) -> tuple[int, bytes, bytes]:
        as_json = b"application/json"
        # A page of a stranger could otherwise have its name lead here.
        if host.rpartition(b":")[0] not in (b"127.0.0.1", b"localhost", b"[::1]") and host not in (
            b"127.0.0.1",
            b"localhost",
        ):
            return 403, as_json, b'{"error": "This door is for this machine: ask for 127.0.0.1."}'
        if method not in ("GET", "HEAD"):
            return 405, as_json, b'{"error": "Ask with GET."}'
        if path == "/metrics":
            return 200, b"text/plain; version=0.0.4; charset=utf-8", generate_latest(self._registry)
        if path == "/status":
            return 200, as_json, json.dumps(status_of(self._supervisor)).encode()
        if path == "/health":
            ready = self._supervisor.is_ready
            return (200 if ready else 503), as_json, json.dumps({"ready": ready}).encode()
        return 404, as_json, b'{"error": "There are /status, /metrics and /health."}'

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now, for prometheus_client."""
        status = status_of(self._supervisor)
        answers = CounterMetricFamily(
            "meshwright_answers",
            "Requests answered, by their status, that of HTTP also where it was gRPC.",
            labels=["model", "status"],
        )
        seconds = HistogramMetricFamily(
            "meshwright_request_seconds", "From a request's first byte to its answer with status 200.", labels=["model"]
        )
        fates = CounterMetricFamily(
            "meshwright_samples",
            "Samples that the scheduler has answered, by what became of them.",
            labels=["model", "fate"],
        )
        batches = CounterMetricFamily("meshwright_batches", "Batches that workers have run.", labels=["model"])
        for model in status["models"]:
            for code, count in model["statuses"].items():
                answers.add_metric([model["name"], str(code)], count)
            for fate, count in model["fates"].items():
                fates.add_metric([model["name"], fate], count)
            batches.add_metric([model["name"]], model["num_batches"])
            seconds.add_metric([model["name"]], *_histogram(model["buckets"], model["latency_ns"]))
        yield from (answers, seconds, fates, batches)
        for name, text, value in (
            ("ready", "1 while requests can be answered.", float(status["ready"])),
            ("queued_samples", "Samples that wait in queues.", status["queued"]),
            ("workers_up", "Workers that are there.", status["up"]),
            ("workers_idle", "Workers that have nothing to do.", status["idle"]),
            ("connections", "Open connections of clients.", status["connections"]),
            ("slack_seconds", "How long before a deadline batches have to end, as measured.", status["slack_s"]),
            ("guard_seconds", "How late timers are, as measured.", status["guard_s"]),
        ):
            yield GaugeMetricFamily(f"meshwright_{name}", text, value=value)
        starts = CounterMetricFamily(
            "meshwright_process_starts", "How often a process was started.", labels=["process"]
        )
        cpu = CounterMetricFamily("meshwright_process_cpu_seconds", "Seconds of processors.", labels=["process"])
        memory = GaugeMetricFamily("meshwright_process_resident_bytes", "Memory in use.", labels=["process"])
        for process in status["processes"]:
            starts.add_metric([process["name"]], process["starts"])
            cpu.add_metric([process["name"]], process["cpu_s"])
            memory.add_metric([process["name"]], process["resident_bytes"])
        yield from (starts, cpu, memory)


def _histogram(buckets: dict[int, int], latency_ns: int) -> tuple[list[tuple[str, float]], float]:
    total, places, rows = 0, sorted(buckets), []
    for bound in _BOUNDS:
        total = sum(buckets[place] for place in places if place < bound)
        rows.append((f"{bucket_begin(bound) / 1e9:.6g}", float(total)))
    return [*rows, ("+Inf", float(sum(buckets.values())))], latency_ns / 1e9


def status_of(supervisor: Supervisor) -> dict[str, Any]:
    """A server as it is: totals, models, processes; the document of ``/status``."""
    facts = supervisor.facts
    scheduler = facts.get("scheduler", {})
    fronts = [each for name, each in facts.items() if name.startswith("front-")]
    return {
        "ready": supervisor.is_ready,
        "policy": supervisor.deployment.policy,
        "time_s": time.time(),
        **{name: scheduler.get(name, 0) for name in ("queued", "up", "idle")},
        **{f"{name}_s": scheduler.get(f"{name}_ns", 0) / 1e9 for name in ("delay", "slack", "guard")},
        "connections": sum(front.get("connections", 0) for front in fronts),
        "models": _models(supervisor, scheduler, fronts),
        "processes": [
            {"name": name, "pid": pid, "starts": supervisor.starts(name), **_usage(pid)}
            for name, pid in {"supervisor": os.getpid(), **supervisor.process_ids()}.items()
        ],
    }


def _models(supervisor: Supervisor, scheduler: dict[str, Any], fronts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    batches = dict(scheduler.get("batches", []))
    rows = []
    for served in served_models(supervisor.deployment):
        statuses: Counter[str] = Counter()
        buckets: Counter[int] = Counter()
        latency_ns = 0
        for front in fronts:
            for name, _, counts in front.get("models", []):
                if name == served.name:
                    statuses.update(counts["statuses"])
                    buckets.update({int(place): count for place, count in counts["buckets"].items()})
                    latency_ns += counts["latency_ns"]
        rows.append(
            {
                "name": served.name,
                "slo_s": served.slo_ns / 1e9,
                "statuses": dict(statuses),
                "fates": {
                    Fate(fate).name.lower(): count
                    for model, fate, count in scheduler.get("fates", [])
                    if model == served.number
                },
                "num_batches": batches.get(served.number, 0),
                "buckets": dict(buckets),
                "latency_ns": latency_ns,
            }
        )
    return rows


def _usage(pid: int) -> dict[str, Any]:
    """Seconds of processors and bytes of memory of a process, as Linux tells (proc(5)); zeros if it has just gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError):
        return {"cpu_s": 0.0, "resident_bytes": 0}
    if not hasattr(os, "sysconf"):
        return {"cpu_s": 0.0, "resident_bytes": 0}
    ticks = int(fields[11]) + int(fields[12])
    return {"cpu_s": ticks / os.sysconf("SC_CLK_TCK"), "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
