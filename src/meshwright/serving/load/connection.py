"""One connection to the server, and the request that is under way on it."""

from __future__ import annotations

import socket


class Connection:
    """See the module's docstring."""

    __slots__ = ("buffer", "is_open", "number", "receive", "request_id", "rest", "send", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.send, self.receive = connection, connection.send, connection.recv
        self.is_open = False
        # The request that is under way, or -1; what of it is still to be sent; what of the answer has come.
        self.number = -1
        self.request_id = b""
        self.rest = b""
        self.buffer: bytearray | None = None
