"""Connections of a front: HTTP/1.1 with keep-alive and pipelining, and limits on what each may cost.

`Connection` hands each request to the `Paths` as an `HttpExchange`; answers leave in the order in which requests came.
No task or timer belongs to a connection or request: `HttpServer` looks at a sixteenth of the connections at each of its
ticks and ends those that take too long, and at a sixteenth of the models for requests that were forgotten.

    431   the request line and headers are longer than ``header_bytes``
    413   the body is longer than ``body_bytes``: from its Content-Length, or once too much has come
    408   the request has not come within ``receive`` seconds
    503   a request is not answered long after its deadline (``stuck``): its policy has forgotten it, or does not go on
    503   there are ``connections`` already, or bodies that are being received take all their memory

A connection that is idle for ``idle`` seconds, or whose client does not read its answers for so long, is closed. No
further requests are read while answers wait to be read, or are owed; so what a client can make a front hold is bounded.
The end of a client's stream counts as its going: what it still waits for is cancelled.
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

# Connections over the limit that are told so, rather than closed at once.
_MOST_REFUSED = 256
# How often it is looked whether all connections are closed, at the end.
_LOOK_S = 0.01
_GROUPS = 16
# A request is forgotten when its deadline passed so many times ``stuck`` ago: whatever computed it was killed by then.
_FORGOTTEN = 2


class HttpServer:
    """Connections of a front, and how long they may take; `serve_http` makes one."""

    def __init__(self, front: Frontend, limits: Server) -> None:
        self.front, self.limits, self.paths = front, limits, Paths(front)
        self.receive_ns, self.idle_ns = round(limits.receive * 1e9), round(limits.idle * 1e9)
        self.heads = Heads()
        self._forgotten_ns = round(_FORGOTTEN * limits.stuck * 1e9)
        self.receiving_bytes = 0
        # What bodies that come in pieces may take until they are there.
        self.most_receiving_bytes = max(4 * limits.body_bytes, limits.tensor_bytes)
        self.sockets: list[Any] = []
        self._groups: list[set[Connection]] = [set() for _ in range(_GROUPS)]
        self._place = 0
        # A connection is looked at four times in the shortest of its times, or each second.
        self._tick_s = min(limits.receive, limits.idle, 4.0) / 4 / _GROUPS
        self._listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Are there more connections than there may be?"""
        return self.front.counts.connections > self.limits.connections

    async def listen(self, host: str, port: int, reuse_port: bool) -> None:
        """Take connections."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self), host, port, reuse_port=reuse_port, backlog=2048
        )
        self.sockets = list(self._listener.sockets)
        self._tick()

    async def drain(self, grace_s: float) -> None:
        """Take no further connections or requests, answer what is under way, and close; at once after so long."""
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
        """A connection was made; the group that it belongs to, or None if there are far too many."""
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
        """A connection has ended."""
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
    """Listen where a server says, or at another port (0: a free one), and answer what a gate lets in.

    Other processes may listen at the same place, each has its share of the connections. With a ``token``, requests must
    have it. Raises OSError if the place cannot be listened at.
    """
    http = HttpServer(Frontend(gate, server, token), server)
    await http.listen(server.host, server.port if port is None else port, reuse_port)
    return http
