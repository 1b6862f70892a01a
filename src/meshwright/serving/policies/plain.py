"""A user's policy in plain Python: a class whose methods get a `View` of the pool instead of its array.

    class Mine:
        def arrive(self, pool, now, queue, request, deadline): ...   # pool.enter(queue, request, deadline)
        def free(self, pool, now, device): ...                       # pool.run(queue, count, device)
        def wake(self, pool, now): ...                               # optional, with next_wake
        def next_wake(self, pool): ...

The simulator calls it uncompiled, ten to a hundred times slower than a compiled policy. Every call of such a policy is
checked. Refused are: more requests than wait, devices that are not idle, requests that the policy has not received, and
more decisions in one call than fit into the pool. Integers may be numpy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

from meshwright.serving.policies import queues
from meshwright.serving.policies.decisions import choices_left, rows_left
from meshwright.serving.policies.pool import (
    CHOSEN,
    CROWDED,
    DECISION,
    DELAY,
    DEVICE,
    HEAD,
    IDLE,
    MODEL,
    MOST,
    NEVER,
    NUM_DECISIONS,
    NUM_DEVICES,
    NUM_QUEUES,
    SLACK,
    SLO,
    WIDTH,
    Ints,
)
from meshwright.spec import ServingError
from meshwright.spec.own_code import first_line, importable, own_line, reported

_METHODS = ("arrive", "free")
_MOST_WAKES = 10_000


class View:
    """A pool as a plain policy sees it. Times are in nanoseconds; ``now`` is the time of the current event."""

    def __init__(self, pool: Ints, now: int, given: dict[int, int]) -> None:
        self._pool = pool
        self._given = given
        self.now = now

    @property
    def num_queues(self) -> int:
        """Number of queues, one for each model."""
        return int(self._pool[NUM_QUEUES])

    @property
    def num_devices(self) -> int:
        """Number of devices, up or down."""
        return int(self._pool[NUM_DEVICES])

    @property
    def delay(self) -> int:
        """Time (ns) between a decision and its start on an idle device."""
        return int(self._pool[DELAY])

    @property
    def idle_devices(self) -> list[int]:
        """Idle devices, ascending."""
        return [device for device in range(self.num_devices) if self.is_idle(device)]

    def is_idle(self, device: int) -> bool:
        """Return whether a device is idle."""
        device = _check("device", device, self.num_devices)
        return bool(self._pool[self._pool[DEVICE] + device] == IDLE)

    def length(self, queue: int) -> int:
        """Return the number of requests that wait in a queue."""
        return int(queues.length_of(self._pool, self._queue(queue)))

    def deadline(self, queue: int, place: int = 0) -> int:
        """Return when (ns) a request must be done: its deadline less the slack; ``place`` 0 is the queue's first."""
        queue = self._queue(queue)
        place = _check(f"place in queue {queue}", place, self.length(queue))
        return int(queues.deadline_at(self._pool, queue, self._pool[self._pool[HEAD] + queue] + place))

    def latency(self, queue: int, batch: int) -> int:
        """Return the time (ns) of a batch of a queue's model; 2**61 for a batch that is too large."""
        queue, batch = self._queue(queue), _check("size of a batch", batch, NEVER)
        return int(queues.latency_of(self._pool, queue, batch)) if batch > 0 else 0

    def largest(self, queue: int) -> int:
        """Return the largest batch of a queue's model."""
        return int(self._pool[self._pool[MOST] + self._pool[self._pool[MODEL] + self._queue(queue)]])

    def slo(self, queue: int) -> int:
        """Return the SLO of a queue's model: the time (ns) from arrival to deadline."""
        return int(self._pool[self._pool[SLO] + self._pool[self._pool[MODEL] + self._queue(queue)]])

    @property
    def slack(self) -> int:
        """How long (ns) before a deadline a batch should end."""
        return int(self._pool[SLACK])

    def enter(self, queue: int, request: int, deadline: int) -> bool:
        """Put the new request into its queue; return False if the queue is full and the request was dropped."""
        if not _is_whole(deadline) or abs(deadline) > NEVER:
            raise ServingError(f"A policy gave {deadline!r} as deadline; expected nanoseconds as a whole number.")
        self._make_sure_of_room(1)
        self._take(queue, request)
        return bool(queues.enter(self._pool, self.now, int(queue), int(request), int(deadline)))

    def refuse(self, queue: int, request: int) -> None:
        """Drop the new request, which has not been put into its queue."""
        self._make_sure_of_room(1)
        self._take(queue, request)
        queues.refuse(self._pool, self.now, int(queue), int(request), CROWDED)

    def drop(self, queue: int, count: int) -> None:
        """Drop the first ``count`` requests of a queue."""
        queue = self._queue(queue)
        count = _check(f"number of requests of queue {queue} to drop", count, self.length(queue) + 1)
        self._make_sure_of_room(count)
        queues.drop(self._pool, self.now, queue, count, CROWDED)

    def run(self, queue: int, count: int, device: int) -> None:
        """Run the first ``count`` requests of a queue as a batch on an idle device."""
        queue = self._queue(queue)
        most = min(self.length(queue), self.largest(queue))
        count = _check(f"size of a batch of queue {queue}", count, most + 1, 1)
        if not self.is_idle(device):
            raise ServingError(f"Device {device} was given a batch but is not idle. Call is_idle first.")
        self._make_sure_of_room(count)
        queues.run(self._pool, self.now, queue, count, int(device))

    def _queue(self, queue: int) -> int:
        return _check("queue", queue, self.num_queues)

    def _take(self, queue: int, request: int) -> None:
        if self._given.get(request) != queue:
            raise ServingError(
                f"A policy put or dropped request {request!r} of queue {queue!r}; expected a request that has arrived "
                "for that queue, each request once."
            )
        del self._given[request]

    def _make_sure_of_room(self, count: int) -> None:
        if rows_left(self._pool) < 1 or choices_left(self._pool) < count:
            rows = (self._pool[CHOSEN] - self._pool[DECISION]) // WIDTH
            raise ServingError(
                f"A policy decided more in one call than its pool has room for: {rows} decisions, where consecutive "
                "drops of one queue count as one. Drop many requests at once, or make some decisions in a later call."
            )


def _check(what: str, value: int, end: int, first: int = 0) -> int:
    """Return a whole number as a Python int if it is in range(first, end). Raises ServingError otherwise."""
    if not _is_whole(value) or not first <= value < end:
        raise ServingError(f"A policy gave {value!r} as {what}; expected {_numbers(first, end)}.")
    return int(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def _numbers(first: int, end: int) -> str:
    return f"a whole number from {first} to {end - 1}" if end > first else "no such call while the queue is empty"


class PlainPolicy:
    """Adapter between the driver and a user's policy class; a new instance of the class is made for each simulation."""

    def __init__(self, make: Callable[[], Any], path: Path) -> None:
        self._make, self._path = make, path
        self.begin_again()

    def begin_again(self) -> None:
        """Make a new instance of the user's policy class, and forget all pending requests."""
        self._mine = self._begin()
        # The queue of each request that the policy has neither enqueued nor dropped.
        self._given: dict[int, int] = {}
        self._woken, self._times = -1, 0

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Call the user's ``arrive``; see `Policy.arrive`."""
        self._given[int(request)] = int(queue)
        with self._told("arrive"):
            self._mine.arrive(self._view(pool, now), int(now), int(queue), int(request), int(deadline))

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Mark the device as idle, and call the user's ``free``; see `Policy.free`."""
        queues.rest(pool, device)
        with self._told("free"):
            self._mine.free(self._view(pool, now), int(now), int(device))

    def wake(self, pool: Ints, now: int) -> None:
        """Call the user's ``wake``, if the class has it; see `Policy.wake`.

        Raises ServingError if the policy is woken again and again at one moment and decides nothing, as time would not
        advance.
        """
        if hasattr(self._mine, "wake"):
            with self._told("wake"):
                self._mine.wake(self._view(pool, now), int(now))
        self._times = self._times + 1 if now == self._woken and pool[NUM_DECISIONS] == 0 else 0
        self._woken = now
        if self._times > _MOST_WAKES:
            raise ServingError(
                f"{self._path}: next_wake returned {now} ns or earlier {_MOST_WAKES} times, and wake decided nothing. "
                "Return a future moment, or None."
            )

    def next_wake(self, pool: Ints) -> int:
        """Return the result of the user's ``next_wake`` (ns); `NEVER` if the class lacks it, or it returns None."""
        if not hasattr(self._mine, "next_wake"):
            return NEVER
        with self._told("next_wake"):
            moment = self._mine.next_wake(self._view(pool, 0))
            if moment is not None and not _is_whole(moment):
                raise ServingError(f"next_wake returned {moment!r}; expected nanoseconds as a whole number, or None.")
        return NEVER if moment is None else min(int(moment), NEVER)

    def _view(self, pool: Ints, now: int) -> View:
        return View(pool, int(now), self._given)

    def _begin(self) -> Any:
        with importable(self._path.parent), reported(self._path, "Making the policy raised", ServingError):
            mine = self._make()
        missing = [name for name in _METHODS if not callable(getattr(mine, name, None))]
        if missing:
            raise ServingError(
                f"The policy of {self._path} has no method {missing[0]!r}; expected a class with "
                f"{' and '.join(_METHODS)}. See the page on writing a policy."
            )
        return mine

    @contextmanager
    def _told(self, method: str) -> Iterator[None]:
        with reported(self._path, f"The policy's {method} raised", ServingError):
            try:
                yield
            except ServingError as problem:
                begin = first_line(getattr(self._mine, method), self._path)
                raise ServingError(f"{problem} ({own_line(problem, self._path, begin)})") from problem
