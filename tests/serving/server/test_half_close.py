"""Connections are half-closed when all that was written has come."""

import asyncio
import contextlib
import socket
import time

import pytest

from meshwright.serving.server import half_close as module
from meshwright.serving.server.half_close import half_close

LIMIT_S = 20.0


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        yield listener


def port_of(listener):
    return listener.getsockname()[1]


def connected(listener):
    """Both ends of a connection: the client's, and the server's."""
    client = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
    return client, listener.accept()[0]


def close_all(listener):
    """Half-close all connections as soon as their clients' systems have said that they have what was written."""
    end = time.monotonic() + LIMIT_S
    while asyncio.run(half_close(port_of(listener))):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_on_its_way_comes_first(server):
    slow, (quick, quicker) = connected(server), connected(server)
    try:
        slow[1].setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += slow[1].send(bytes(2**16))
        assert asyncio.run(half_close(port_of(server))) == 1
        assert quick.recv(1) == b""
        quick.send(b"it still hears")
        assert quicker.recv(14) == b"it still hears"
        while sent:
            sent -= len(slow[0].recv(min(sent, 2**20)))
        close_all(server)
        assert slow[0].recv(1) == b""
        again = socket.create_connection(server.getsockname(), timeout=LIMIT_S)
        again.close()
    finally:
        for end in (*slow, quick, quicker):
            end.close()


def test_connections_to_others_stay(server, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    here, there = connected(server)
    local, remote = socket.socketpair()
    with here, there, local, remote:
        assert asyncio.run(half_close(1)) == 0
        there.send(b"x")
        assert here.recv(1) == b"x"
        remote.send(b"x")
        assert local.recv(1) == b"x"
        # The client's end is none of the server's.
        close_all(server)
        here.send(b"x")
        assert there.recv(1) == b"x"
        assert here.recv(1) == b""
