"""Half-close the connections to a port of this process: the process sends no more data, but still receives.

gRPC needs this at the end of `RpcServer.drain`: its library offers no such shutdown, and hides its connections.
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
except ImportError:  # a server runs on Linux; other systems may still import this module
    fcntl = termios = None  # type: ignore[assignment]

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_OPEN_FILES = Path("/proc/self/fd")
# Connections that are checked before other tasks get their turn: some milliseconds.
_AT_ONCE = 256


async def half_close(port: int) -> int:
    """Half-close the connections to ``port`` whose clients have acknowledged all data; return how many have not.

    Unacknowledged data would be lost if the client sent something after the full close.
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
    """Half-close a descriptor that is such a connection; return whether it still has unacknowledged data."""
    # The duplicate cannot be closed by others and reused for another file.
    copy = os.dup(file)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # not a socket
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
