"""The process of a frontend: it reads requests from the network, and answers them.

Run as ``python -m meshwright.serving.server.front_process FOLDER [TOKEN-FILE]``; ``FOLDER`` contains deployment.json.
Ends when its standard input ends, or, after all requests under way have been answered, on SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from meshwright.serving.server.counters import Counts
from meshwright.serving.server.gate import Gate
from meshwright.serving.server.http import HttpServer, serve_http
from meshwright.serving.server.recording import RecordingControl
from meshwright.serving.server.reports import Orders, keep_what_is_there, report, reporting_errors
from meshwright.serving.server.rpc import RpcServer, most_connections, serve_rpc
from meshwright.serving.server.tokens import read_token
from meshwright.serving.server.totals import NO_MODEL
from meshwright.spec import Server, ServingError, read_deployment

try:
    import resource
except ImportError:  # a server runs on Linux; other systems may still import this module
    resource = None  # type: ignore[assignment]

_EVERY_S, _DRAIN_S = 1.0, 25.0
# Files besides connections: libraries, slabs, the event loop, connections that are refused over the limit.
_OTHER_FILES = 1024


async def serve(folder: Path, token: str | None) -> None:
    """Answer requests until SIGTERM; ``folder`` contains deployment.json, and requests must carry ``token``, if given.

    Raises ServingError if the process cannot listen at the server's ports.
    """
    settings = read_deployment(folder / "deployment.json").server
    settings = _open_enough(settings)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    gate = Gate(folder, settings.tensor_bytes)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    try:
        http = await serve_http(gate, settings, token=token)
        servers: list[HttpServer | RpcServer] = [http]
        if settings.grpc:
            servers.append(await serve_rpc(http.front, settings))
    except (OSError, RuntimeError) as error:
        raise ServingError(
            f"A frontend cannot listen at {settings.host}, ports {settings.port} and {settings.grpc_port}: {error}. "
            "Give another host, as an IP address, or other ports."
        ) from None
    orders, recorder = Orders(), RecordingControl(lambda: [gate, http.front])
    loop.add_reader(sys.stdin, lambda: recorder.obey(orders.read()))

    def tell() -> None:
        counts = http.front.counts
        report(
            "front",
            ready=gate.is_ready,
            connections=counts.connections,
            cancelled=counts.cancelled,
            refused=counts.refused,
            answers=[[name, _facts(of)] for name, of in (*counts.models.items(), (NO_MODEL, counts.others))],
        )

    gate.changed = tell
    keep_what_is_there()
    connecting = asyncio.create_task(gate.keep_connected())
    while not ended.is_set() and not connecting.done():
        tell()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _EVERY_S)
    if connecting.done():
        connecting.result()  # raises its error; the supervisor starts another frontend
    await asyncio.gather(*(server.drain(_DRAIN_S) for server in servers))
    connecting.cancel()


def _open_enough(settings: Server) -> Server:
    """Raise the limit of open files for the connections; reduce the connections if the system allows fewer files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.connections + most_connections(settings) * settings.grpc + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        share = max(hard - _OTHER_FILES, hard // 4) / (wanted - _OTHER_FILES)
        settings = replace(settings, connections=max(int(share * settings.connections), 1))
        report("limited", files=hard, wanted=wanted, connections=settings.connections)
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return settings


def _facts(counts: Counts) -> dict[str, Any]:
    return {
        "statuses": counts.statuses,
        "buckets": {place: count for place, count in enumerate(counts.buckets) if count},
        "latency_ns": counts.latency_ns,
    }


def main(arguments: list[str]) -> None:
    """Run a frontend until its standard input ends or SIGTERM arrives.

    ``arguments``: the folder with deployment.json, and optionally the file with the token that requests must carry.
    """
    with reporting_errors():
        token = read_token(Path(arguments[1])) if arguments[1:] else None
        uvloop.run(serve(Path(arguments[0]), token))


if __name__ == "__main__":
    main(sys.argv[1:])
