"""Messages between the processes of a server: arrays of int64, or documents, over local sockets.

A message is one array whose first cell is its kind (`Kind`); the kernel preserves the order and the boundaries of
messages (SOCK_SEQPACKET). Sending never blocks: messages that do not fit into the socket's buffer are kept in order,
and `flush` sends them later. If the process at the other end has ended, `Closed` is raised.
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import Ints
from meshwright.spec import ServingError

# A message must fit into a socket's buffer, usually 200 KiB; an array with this number of cells takes half of that.
MOST_CELLS = 12_000
_MOST_BYTES = 8 * MOST_CELLS
# Messages that are read in one call, before other channels get their turn.
_AT_ONCE = 64


class Kind(enum.IntEnum):
    """The kind of a message, which is its first cell, and the cells that follow it. Times are in ns.

    TEXT    1 if the document continues in the next message, else 0; then bytes of JSON
    SUBMIT  rows of (model, slot, deadline): new requests of a frontend; slots include a level (`policies.ordering`)
    CANCEL  rows of (model, slot, deadline): requests whose clients have disconnected
    ANSWER  model, outcome (`Fate`), end of the batch (0: no batch), slots of the requests with this outcome
    RUN     number of the batch, model, expected time, count, requests, deadlines: a batch for a worker to compute
    RAN     number of the batch, begin, end, number of requests that were not computed, indices in the batch of these
            requests, indices of those that failed
    LATE    samples of how long after the end of a batch a frontend had answered its requests
    """

    TEXT, SUBMIT, CANCEL, ANSWER, RUN, RAN, LATE = range(7)


class Closed(Exception):  # noqa: N818 - it is not an error
    """The process at the other end of the channel has closed it, or has ended."""


class MessageChannel:
    """One end of a connection between two processes of a server."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._waiting: deque[bytes] = deque()
        self._text = b""
        # Allocating a new object of this size for each message takes 20 us (own measurement 2026-11-24), mostly for
        # pages that the system maps and unmaps.
        self._room = memoryview(bytearray(2 * _MOST_BYTES))

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def is_waiting(self) -> bool:
        """Whether messages wait for room in the socket's buffer; `flush` sends them."""
        return bool(self._waiting)

    def send(self, cells: Ints) -> None:
        """Send a message of at most `MOST_CELLS` cells, the first of which is its `Kind`. Raises Closed."""
        self._send(cells.tobytes())

    def send_text(self, document: Any) -> None:
        """Send a document as JSON. Raises Closed."""
        data, room = json.dumps(document).encode(), _MOST_BYTES - 16
        for place in range(0, max(len(data), 1), room):
            head = np.array([Kind.TEXT, place + room < len(data)], np.int64).tobytes()
            self._send(head + data[place : place + room])

    def flush(self) -> None:
        """Send waiting messages, as far as there is room in the socket's buffer. Raises Closed."""
        while self._waiting and self._try(self._waiting[0]):
            self._waiting.popleft()

    def receive(self) -> Iterator[tuple[int, Any]]:
        """Yield up to 64 received messages: (kind, cells after the kind), or (`Kind.TEXT`, document). Raises Closed."""
        for _ in range(_AT_ONCE):
            try:
                size = self.socket.recv_into(self._room)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The other side closed before it read everything; the system reports this before the data it had sent.
                continue
            except OSError:
                raise Closed from None
            if not size:
                raise Closed
            data = bytes(self._room[:size])
            if len(data) >= 16 and data[:8] == b"\0\0\0\0\0\0\0\0":
                self._text += data[16:]
                if not data[8]:
                    text, self._text = self._text, b""
                    yield Kind.TEXT, json.loads(text)
            else:
                cells = np.frombuffer(data, np.int64)
                yield int(cells[0]), cells[1:]

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _send(self, data: bytes) -> None:
        if self._waiting or not self._try(data):
            self._waiting.append(data)

    def _try(self, data: bytes) -> bool:
        try:
            self.socket.send(data)
        except BlockingIOError:
            return False
        except OSError:
            raise Closed from None
        return True


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at a path; an existing file there is removed."""
    path.unlink(missing_ok=True)
    listener = _socket()
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        listener.bind(str(path))
        listener.listen(1024)
        listener.setblocking(False)
        stack.pop_all()
    return listener


def connect(path: Path) -> MessageChannel | None:
    """Connect to a listener; return None if nothing listens there, or no further file can be opened."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        connection = stack.enter_context(_socket())
        connection.connect(str(path))
        stack.pop_all()
        return MessageChannel(connection)
    return None


def _socket() -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise ServingError(
            "A server's processes need Unix domain sockets, which this system does not have. Serve on Linux."
        )
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
