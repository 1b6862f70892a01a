"""Send requests at their moments and receive answers, in one process without threads.

A request's moment is the time at which it is due to be sent. A turn of the loop sends all requests that are due, waits
for the next moment or an answer, and reads what has arrived. A request that finds no idle connection waits for one, and
its latency still counts from its moment. The most recently used connections are used first, each with at most one
request at a time.

The loop waits by select(2) on the selector's descriptor, whose timeouts are in microseconds; those of epoll_wait(2) are
in milliseconds. The kernel adds 50 microseconds (prctl(2), PR_SET_TIMERSLACK). To fall asleep and wake up takes more
processor time (24 microseconds on a virtual machine) than a request (10). Therefore, with dense requests, one turn
serves all requests of a fifth of a millisecond.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.serving.load.bodies import ID_DIGITS
from meshwright.serving.load.responses import MOST_REASON_BYTES, MalformedError, Response, is_for_another, read_answer
from meshwright.serving.load.result import LoadJob, RequestRecords, UnansweredReason
from meshwright.spec import ServingError

_NS = 1_000_000_000
# Longest turn, so that progress is reported and a stop is noticed.
_LONGEST_TURN_NS = 50_000_000
# Least time between the starts of turns with dense requests: bounds what this adds to lateness and latency.
_REST_NS = 200_000
# Answers that are read before the loop checks again whether requests are due.
_READ_AT_ONCE = 16
# Connections that are being opened at a time: the queue of a listening socket holds 128 or more (listen(2), SOMAXCONN
# of old), and a client that finds it full retries only after a second.
_CONNECTING_AT_ONCE = 64
_SHORTEST_PAUSE_NS, _LONGEST_PAUSE_NS = 10_000_000, _NS
_CONNECT_S = 10.0
# Bytes that are read at once, and of a longer answer. The buffer for either is allocated in 1.5 microseconds; one of
# 2**18 bytes, for which the system maps pages, in 14 (2026-11-25, Linux 6 and glibc, two cores).
_READ_BYTES, _READ_MORE_BYTES = 2**14, 2**16
# How long answers are waited for after a stop.
_STOP_GRACE_NS = _NS


class Loop:
    """Sends the requests of a job at their moments and receives the answers: call `connect`, then `run`, then `close`.

    If data arrive from ``stop`` (a connection of `multiprocessing`), the loop ends early.
    """

    def __init__(self, job: LoadJob, stop: Any = None) -> None:
        count = len(job.moments)
        self._job, self._requests, self._check = job, job.requests, job.check
        self._first, self._step = job.first, job.step
        self._selector = selectors.DefaultSelector()
        self._stop = stop
        if stop is not None:
            self._selector.register(stop, selectors.EVENT_READ, None)
        self._connections: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []
        self._num_connecting = 0
        self._num_opened = 0
        self._most = job.connections
        # After a failed attempt, the next one is made only from this moment on.
        self._again_ns = 0
        self._pause_ns = 0
        self._backlog: deque[int] = deque()
        # The next request, the number of requests, and those that are not done; 0 before the start.
        self._next = self._count = self._num_left = 0
        self._is_stopped = False
        # Nothing is sent or waited for after this moment.
        self._end_ns = 0
        self._now = 0
        self._moments = job.moments.data
        self._whose = job.whose.data
        self._bodies: dict[int, bytes] = {}
        self._columns = (
            np.full(count, UnansweredReason.UNSENT, np.int16),
            np.zeros(count, np.float32),
            np.zeros(count, np.float32),
            np.zeros(count, np.bool_),
        )
        status, lateness, latency, waited = self._columns
        self._status, self._waited = status.data, waited.data
        # memoryview's types do not include arrays of float32.
        self._lateness: Any = lateness.data
        self._latency: Any = latency.data

    def connect(self) -> None:
        """Open the connections that the job needs at its start. Raises ServingError if none can be opened."""
        until = time.perf_counter() + _CONNECT_S
        wanted = min(self._job.at_first, self._most)
        while len(self._idle) < wanted and time.perf_counter() < until and not self._again_ns:
            self._now = time.perf_counter_ns()
            room = min(wanted - len(self._connections), _CONNECTING_AT_ONCE - self._num_connecting)
            for _ in range(room):
                self._open()
            self._turn(0.1)
        if wanted and not self._idle:
            raise ServingError("The server accepted no connection. Is it running, and below its limit of connections?")
        self._again_ns = self._pause_ns = 0

    def run(self, begin_ns: int, tell: Callable[[int, int], None] | None = None) -> RequestRecords:
        """Send all requests, receive the answers, and return the records of all requests.

        Moments count from ``begin_ns``, a time of `time.perf_counter_ns`. ``tell(sent, done)`` is called four times a
        second. Ctrl-C, or data from ``stop``, ends the run early; then answers are waited for one more second.
        """
        self._moments = (self._job.moments + begin_ns).data
        self._count = self._num_left = len(self._moments)
        if self._count:
            self._end_ns = self._moments[-1] + int(self._job.grace_s * _NS)
        collects = gc.isenabled()
        gc.disable()
        cpu_s = time.thread_time()
        try:
            try:
                self._go_on(tell)
            except KeyboardInterrupt:
                self._end_early()
                self._go_on(None)
        finally:
            cpu_s = time.thread_time() - cpu_s
            if collects:
                gc.enable()
        status, lateness, latency, waited = self._columns
        return RequestRecords(
            status=status[: self._count],
            lateness=lateness[: self._count],
            latency=latency[: self._count],
            waited=waited[: self._count],
            bodies=self._bodies,
            cpu_s=cpu_s,
            end_ns=max(self._now - begin_ns, 0),
            num_connections=self._num_opened,
        )

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()

    def _go_on(self, tell: Callable[[int, int], None] | None) -> None:
        clock, moments = time.perf_counter_ns, self._moments
        told_ns = clock()
        while self._num_left:
            began_ns = now = clock()
            if self._next < self._count and moments[self._next] <= now:
                self._send_due(now)
                now = clock()
            if now > self._end_ns:
                break
            if self._backlog:
                self._open_more(now)
            wait_ns = _LONGEST_TURN_NS
            if self._next < self._count:
                wait_ns = min(wait_ns, moments[self._next] - now)
                rest_ns = began_ns + _REST_NS - now
                if rest_ns > max(wait_ns, 0):
                    time.sleep(rest_ns / _NS)
                    wait_ns = 0
            self._turn(wait_ns / _NS)
            if tell is not None and now - told_ns > _NS // 4:
                told_ns = now
                tell(self._next, self._count - self._num_left)
        if tell is not None:
            tell(self._next, self._count - self._num_left)

    def _end_early(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self._end_ns = min(self._end_ns, time.perf_counter_ns() + _STOP_GRACE_NS)
        self._num_left -= self._count - self._next
        self._count = self._next

    def _turn(self, seconds: float) -> None:
        """Wait up to some seconds for events, and handle them."""
        selector = self._selector
        if seconds > 0 and hasattr(selector, "fileno"):
            if not select.select((selector.fileno(),), (), (), seconds)[0]:
                self._now = time.perf_counter_ns()
                return
            seconds = 0
        ready = selector.select(max(seconds, 0))
        self._now = time.perf_counter_ns()
        for place, (key, events) in enumerate(ready, 1):
            connection = key.data
            if connection is None:
                self._selector.unregister(self._stop)
                self._end_early()
            elif connection not in self._connections:
                continue  # closed by an earlier event of this turn
            elif events & selectors.EVENT_READ and connection.is_open:
                self._read(connection)
            else:
                self._write(connection)
            if place % _READ_AT_ONCE == 0 and self._next < self._count:
                now = time.perf_counter_ns()
                if self._moments[self._next] <= now:
                    self._send_due(now)

    def _send_due(self, now: int) -> None:
        moments, idle = self._moments, self._idle
        while self._next < self._count and moments[self._next] <= now:
            number = self._next
            self._next = number + 1
            self._status[number] = UnansweredReason.UNANSWERED
            if idle:
                self._send(idle.pop(), number)
            else:
                self._wait_for_connection(number, now)

    def _send(self, connection: ClientConnection, number: int) -> None:
        # As in the JSON of request and answer.
        request_id = b'"%010d"' % (self._first + number * self._step)
        bodies = self._requests[self._whose[number]]
        request = bodies[number % len(bodies)]
        content, place = request.content, request.id_place
        content[place - 1 : place + ID_DIGITS + 1] = request_id
        connection.number, connection.request_id = number, request_id
        late_ns = time.perf_counter_ns() - self._moments[number]
        self._lateness[number] = late_ns / _NS
        request.tell_timeout(late_ns)
        try:
            done = connection.send(content)
        except BlockingIOError:
            done = 0
        except OSError:
            self._lose(connection)
            return
        if done < len(content):
            # Copied: the bytes are reused for the next request, with another id.
            connection.rest = bytes(content[done:])
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _wait_for_connection(self, number: int, now: int) -> None:
        self._waited[number] = True
        self._backlog.append(number)
        if now < self._again_ns and not self._connections:
            self._fail_backlog()
        else:
            self._open_more(now)

    def _fail_backlog(self) -> None:
        """Fail waiting requests: there is no connection and none can be opened."""
        while self._backlog:
            self._settle(self._backlog.popleft(), UnansweredReason.FAILED)

    def _settle(self, number: int, status: int) -> None:
        self._status[number] = status
        self._latency[number] = (self._now - self._moments[number]) / _NS
        self._num_left -= 1

    def _open_more(self, now: int) -> None:
        while (
            self._num_connecting < min(len(self._backlog), _CONNECTING_AT_ONCE)
            and len(self._connections) < self._most
            and now >= self._again_ns
        ):
            self._open()

    def _open(self) -> None:
        connection = None
        try:
            plain = socket.socket(socket.AddressFamily(self._job.family), socket.SOCK_STREAM)
            connection = ClientConnection(plain)
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            problem = plain.connect_ex(self._job.address)
            if problem not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
                raise OSError(problem, os.strerror(problem))
            self._selector.register(plain, selectors.EVENT_WRITE, connection)
        except OSError as error:
            if connection is not None:
                connection.socket.close()
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._connections:
                self._most = len(self._connections)
            else:
                self._pause()
            return
        self._connections.add(connection)
        self._num_connecting += 1

    def _write(self, connection: ClientConnection) -> None:
        """Handle a connection that was opened, could not be opened, or has room to send more."""
        if not connection.is_open:
            self._num_connecting -= 1
            if connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._drop(connection)
                self._pause()
                return
            connection.is_open = True
            self._num_opened += 1
            self._again_ns = self._pause_ns = 0
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            self._free(connection)
            return
        try:
            connection.rest = connection.rest[connection.send(connection.rest) :]
        except BlockingIOError:
            return
        except OSError:
            self._lose(connection)
            return
        if not connection.rest:
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _pause(self) -> None:
        """Delay the next attempt to connect after a failed one, each time for longer."""
        if self._now >= self._again_ns:
            self._pause_ns = min(max(2 * self._pause_ns, _SHORTEST_PAUSE_NS), _LONGEST_PAUSE_NS)
            self._again_ns = self._now + self._pause_ns
        if not self._connections:
            self._fail_backlog()

    def _free(self, connection: ClientConnection) -> None:
        if self._backlog:
            self._send(connection, self._backlog.popleft())
        else:
            self._idle.append(connection)

    def _lose(self, connection: ClientConnection) -> None:
        """Handle the end of a connection: its request, if it has one, has failed."""
        self._drop(connection)
        if connection.number >= 0:
            self._settle(connection.number, UnansweredReason.FAILED)

    def _drop(self, connection: ClientConnection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.discard(connection)
        if connection.number < 0:
            with contextlib.suppress(ValueError):
                self._idle.remove(connection)

    def _read(self, connection: ClientConnection) -> None:
        try:
            data = connection.receive(_READ_BYTES if connection.buffer is None else _READ_MORE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._lose(connection)
            return
        if connection.number < 0:
            # The server closes an idle connection.
            self._drop(connection)
            return
        ended = not data
        if connection.buffer is not None:
            connection.buffer += data
            data = bytes(connection.buffer)
        try:
            answer = read_answer(data, ended=ended)
        except MalformedError:
            self._take(connection, UnansweredReason.MALFORMED, closes=True)
            return
        if answer is not None:
            self._take(connection, self._judge(connection, answer), closes=ended or answer.head.closes)
        elif ended:
            # Without any byte it is a lost connection; in the middle of an answer, a malformed one.
            self._take(connection, UnansweredReason.MALFORMED if data else UnansweredReason.FAILED, closes=True)
        elif connection.buffer is None:
            connection.buffer = bytearray(data)

    def _take(self, connection: ClientConnection, status: int, *, closes: bool) -> None:
        """Settle the request of a connection, and reuse the connection unless it is at its end."""
        self._settle(connection.number, status)
        if closes or connection.rest:
            self._drop(connection)
            return
        connection.number, connection.buffer = -1, None
        self._free(connection)

    def _judge(self, connection: ClientConnection, answer: Response) -> int:
        """Return the status of an answer, or why it is not accepted."""
        status = answer.head.status
        if status != 200:
            self._bodies.setdefault(status, answer.body[:MOST_REASON_BYTES])
            return status
        text = answer.text
        if connection.request_id not in text:
            return (
                UnansweredReason.WRONG
                if is_for_another(answer, connection.request_id[1:-1].decode())
                else UnansweredReason.MALFORMED
            )
        if not text.endswith(b"}") and not text.rstrip().endswith(b"}"):
            return UnansweredReason.MALFORMED
        if self._check is not None:
            number = connection.number
            whose = self._whose[number]
            if not self._check(self._job.names[whose], number % len(self._requests[whose]), answer):
                return UnansweredReason.WRONG
        return status


class ClientConnection:
    """A connection to the server, with at most one request under way; ``number`` is its request, or -1."""

    __slots__ = ("buffer", "is_open", "number", "receive", "request_id", "rest", "send", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.send, self.receive = connection, connection.send, connection.recv
        self.is_open = False
        # The request under way, or -1; the rest of it that is still to be sent; the received part of the answer.
        self.number = -1
        self.request_id = b""
        self.rest = b""
        self.buffer: bytearray | None = None
