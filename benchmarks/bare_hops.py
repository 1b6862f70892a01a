"""What a quiet server cannot be faster than: a request's way through three processes that do nothing else.

A client asks a front over TCP, which asks a scheduler, which asks a worker, which sleeps as long as a batch of one
takes; the answer comes back the same way. All of them wait in blocking calls, and send a few bytes. Ten requests a
second, as `serving_live` asks a quiet server, so that processors sleep and caches are cold in between.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_BYTES, _LIMIT_S = 300, 20.0


def bare_hops(batch_s: float, count: int, pause_s: float = 0.1) -> np.ndarray:
    """Seconds that requests took beyond the sleep of ``batch_s``."""
    with _processes(batch_s) as client:
        taken = np.zeros(count)
        for place in range(count):
            time.sleep(pause_s)
            begin = time.perf_counter()
            client.sendall(b"x" * _BYTES)
            client.recv(2 * _BYTES)
            taken[place] = time.perf_counter() - begin
    return taken - batch_s


@contextlib.contextmanager
def _processes(batch_s: float) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=_LIMIT_S))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = stack.enter_context(listener.accept()[0])
        asked.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        ends = [stack.enter_context(end) for pair in pairs for end in pair]
        roles: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (_pass_on, (asked, ends[0])),
            (_pass_on, (ends[1], ends[2])),
            (_sleep, (ends[3], batch_s)),
        ]
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=role, args=given, daemon=True) for role, given in roles]
        for process in processes:
            process.start()
            stack.callback(process.join, _LIMIT_S)
            stack.callback(process.kill)
        yield client


def _pass_on(before: socket.socket, behind: socket.socket) -> None:
    while data := before.recv(2 * _BYTES):
        behind.send(data)
        before.send(behind.recv(2 * _BYTES))


def _sleep(before: socket.socket, batch_s: float) -> None:
    while data := before.recv(2 * _BYTES):
        time.sleep(batch_s)
        before.send(data)
