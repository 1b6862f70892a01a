"""Half-closed connections of a process to a port of its own: it says nothing any more, and still hears.

For a library that has no such end itself and keeps its connections to itself (gRPC: what `rpc` does last).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path

try:
    import fcntl
    import termios
except ImportError:  # a server runs on Linux; this is for whoever only reads it
    fcntl = termios = None  # type: ignore[assignment]

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_OPEN_FILES = Path("/proc/self/fd")
# Connections that are looked at before others get their turn: some milliseconds.
_AT_ONCE = 256


async def half_close(port: int) -> int:
    """Half-close the connections whose clients' systems have all that was written; how many others there are.

    What is still on its way would be lost if the client sent something after the whole end.
    """
    left = 0
    with contextlib.suppress(OSError):  # no further file can be opened
        for count, entry in enumerate(_OPEN_FILES.iterdir()):
            if count % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            with contextlib.suppress(OSError):  # closed meanwhile
                left += _half_close_if(int(entry.name), port)
    return left


def _half_close_if(file: int, port: int) -> bool:
    """Half-close what may be such a connection; is it one that something is on its way by?"""
    # A copy cannot be closed and become another file meanwhile.
    copy = os.dup(file)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        raise
    with connection:
        if connection.family not in _INTERNET or connection.getsockname()[1] != port:
            return False
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        if struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
            return True
        connection.shutdown(socket.SHUT_WR)
    return False
