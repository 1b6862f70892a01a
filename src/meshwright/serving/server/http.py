"""Connections of a frontend: HTTP/1.1 with keep-alive and pipelining, and limits on memory and time of each.

`Connection` passes each request to `Paths` as an `HttpExchange`; answers are sent in the order of the requests. No task
or timer belongs to a connection or request: at each tick, `HttpServer` checks a sixteenth of the connections and ends
those that exceed a time limit, and checks a sixteenth of the models for forgotten requests.

    431   the request line and headers are longer than ``header_bytes``
    413   the body is longer than ``body_bytes``: by its Content-Length, or once too much has arrived
    408   the request has not arrived within ``receive`` seconds
    503   a request has no answer long after its deadline (``stuck``): its policy has forgotten it, or is blocked
    503   there are ``connections`` already, or the bodies being received use all the memory for bodies

The names are settings of the deployment (``[server]``). A connection that is idle for ``idle`` seconds, or whose client
does not read its answers for that time, is closed. No further requests of a connection are read while its client does
not read answers, or has too many pending requests; this bounds the memory per client. When a client closes its side of
the connection, its pending requests are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from meshwright.serving.server.connection import Connection
from meshwright.serving.server.front import Frontend
from meshwright.serving.server.gate import Gate
from meshwright.serving.server.heads import Heads
from meshwright.serving.server.paths import Paths
from meshwright.spec import Server

# Connections over the limit that get an answer that says so; further ones are closed at once.
_MOST_REFUSED = 256
# How often a shutdown checks whether all connections are closed.
_LOOK_S = 0.01
_GROUPS = 16
# A request is forgotten when its deadline is this multiple of ``stuck`` ago: a worker that had it was killed by then.
_FORGOTTEN = 2


class HttpServer:
    """The HTTP connections of a frontend, and their limits; made by `serve_http`."""

    def __init__(self, front: Frontend, limits: Server) -> None:
        self.front, self.limits, self.paths = front, limits, Paths(front)
        self.receive_ns, self.idle_ns = round(limits.receive * 1e9), round(limits.idle * 1e9)
        self.heads = Heads()
        self._forgotten_ns = round(_FORGOTTEN * limits.stuck * 1e9)
        self.receiving_bytes = 0
        # Memory for bodies that arrive in pieces, until they are complete.
        self.most_receiving_bytes = max(4 * limits.body_bytes, limits.tensor_bytes)
        self.sockets: list[Any] = []
        self._groups: list[set[Connection]] = [set() for _ in range(_GROUPS)]
        self._place = 0
        # A connection is checked four times in the shortest of its time limits, or each second.
        self._tick_s = min(limits.receive, limits.idle, 4.0) / 4 / _GROUPS
        self._listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are more connections than allowed."""
        return self.front.counts.connections > self.limits.connections

    async def listen(self, host: str, port: int, reuse_port: bool) -> None:
        """Listen for connections."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self), host, port, reuse_port=reuse_port, backlog=2048
        )
        self.sockets = list(self._listener.sockets)
        self._tick()

    async def drain(self, grace_s: float) -> None:
        """Accept no further connections or requests, answer pending requests, and close all connections.

        Connections that are still open after ``grace_s`` seconds are aborted.
        """
        self.front.is_draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in [each for group in self._groups for each in group]:
            connection.finish()
        end = time.monotonic() + grace_s
        while self.front.counts.connections and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        for connection in [each for group in self._groups for each in group]:
            connection.abort()
        while self.front.counts.connections:
            await asyncio.sleep(0)
        if self._timer is not None:
            self._timer.cancel()

    def join(self, connection: Connection) -> set[Connection] | None:
        """Add a new connection; return its group, or None if it has to be closed without an answer.

        That is the case for connections that exceed the limit by more than 256.
        """
        counts = self.front.counts
        counts.accepted += 1
        if counts.connections >= self.limits.connections:
            counts.refused += 1
            if counts.connections >= self.limits.connections + _MOST_REFUSED:
                return None
        counts.connections += 1
        group = self._groups[counts.accepted % _GROUPS]
        group.add(connection)
        return group

    def leave(self, connection: Connection, group: set[Connection]) -> None:
        """Remove a connection that has ended."""
        group.discard(connection)
        self.front.counts.connections -= 1

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        self._place = (self._place + 1) % _GROUPS
        self.paths.answers.tick()
        now_ns = time.monotonic_ns()
        for connection in list(self._groups[self._place]):
            connection.check(now_ns)
        self.front.gate.give_up_forgotten(now_ns - self._forgotten_ns, self._place, _GROUPS)


async def serve_http(
    gate: Gate,
    server: Server,
    *,
    token: str | None = None,
    port: int | None = None,
    reuse_port: bool = True,
) -> HttpServer:
    """Listen at the server's address, or at another port (0: a free one), and answer the requests.

    Other processes may listen at the same port; each gets a share of the connections. With a ``token``, requests must
    carry it. Raises OSError if listening fails.
    """
    http = HttpServer(Frontend(gate, server, token), server)
    await http.listen(server.host, server.port if port is None else port, reuse_port)
    return http
