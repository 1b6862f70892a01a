"""A policy of a stranger, in plain Python: a class whose methods get a `View` of the pool instead of its array.

    class Mine:
        def arrive(self, pool, now, queue, request, deadline): ...   # pool.enter(queue, request, deadline)
        def free(self, pool, now, device): ...                       # pool.run(queue, count, device)
        def wake(self, pool, now): ...                               # optional, with next_wake
        def next_wake(self, pool): ...

The simulator calls it uncompiled, ten to a hundred times slower than a compiled one. All that such a policy asks for is
checked: more requests than wait, devices that are not idle, requests that it was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.serving.policies import queues
from meshwright.serving.policies.pool import (
    CROWDED,
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
    Ints,
)
from meshwright.spec import ServingError
from meshwright.spec.own_code import importable, reported

_METHODS = ("arrive", "free")
_MOST_WAKES = 10_000


class View:
    """A pool as a plain policy sees it; times are nanoseconds, ``now`` the moment of the event."""

    def __init__(self, pool: Ints, now: int, given: dict[int, int]) -> None:
        self._pool = pool
        self._given = given
        self.now = now

    @property
    def num_queues(self) -> int:
        """Queues, one of each model."""
        return int(self._pool[NUM_QUEUES])

    @property
    def num_devices(self) -> int:
        """Devices, up or down."""
        return int(self._pool[NUM_DEVICES])

    @property
    def delay(self) -> int:
        """What passes between a decision and its begin on an idle device."""
        return int(self._pool[DELAY])

    @property
    def idle_devices(self) -> list[int]:
        """Devices that have nothing to do, ascending."""
        return [device for device in range(self.num_devices) if self.is_idle(device)]

    def is_idle(self, device: int) -> bool:
        """Has this device nothing to do?"""
        self._check("device", device, self.num_devices)
        return bool(self._pool[self._pool[DEVICE] + device] == IDLE)

    def length(self, queue: int) -> int:
        """Requests that wait in a queue."""
        self._check("queue", queue, self.num_queues)
        return int(queues.length_of(self._pool, queue))

    def deadline(self, queue: int, place: int = 0) -> int:
        """When a request of a queue has to be done, less the slack; place 0 is the first one."""
        self._check(f"place in queue {queue}", place, self.length(queue))
        return int(queues.deadline_at(self._pool, queue, self._pool[self._pool[HEAD] + queue] + place))

    def latency(self, queue: int, batch: int) -> int:
        """What a batch of a queue's model takes; a very large number for one that is too large."""
        self._check("queue", queue, self.num_queues)
        self._check("batch", batch, NEVER)
        return int(queues.latency_of(self._pool, queue, batch)) if batch > 0 else 0

    def largest(self, queue: int) -> int:
        """The largest batch of a queue's model."""
        self._check("queue", queue, self.num_queues)
        return int(self._pool[self._pool[MOST] + self._pool[self._pool[MODEL] + queue]])

    def slo(self, queue: int) -> int:
        """From arrival to deadline."""
        self._check("queue", queue, self.num_queues)
        return int(self._pool[self._pool[SLO] + self._pool[self._pool[MODEL] + queue]])

    @property
    def slack(self) -> int:
        """How long before a deadline a batch should end."""
        return int(self._pool[SLACK])

    def enter(self, queue: int, request: int, deadline: int) -> bool:
        """Put the request that has come into its queue; False if the queue is full, and the request is dropped."""
        self._take(queue, request)
        if not _is_whole(deadline) or abs(deadline) > NEVER:
            raise ServingError(f"A policy gave the deadline {deadline!r}; expected nanoseconds as a whole number.")
        return bool(queues.enter(self._pool, self.now, queue, request, deadline))

    def refuse(self, queue: int, request: int) -> None:
        """Drop the request that has come."""
        self._take(queue, request)
        queues.refuse(self._pool, self.now, queue, request, CROWDED)

    def drop(self, queue: int, count: int) -> None:
        """Drop the first requests of a queue."""
        self._check(f"number of requests of queue {queue} to drop", count, self.length(queue) + 1)
        queues.drop(self._pool, self.now, queue, count, CROWDED)

    def run(self, queue: int, count: int, device: int) -> None:
        """Run the first requests of a queue as a batch on an idle device."""
        self._check(f"batch of queue {queue} less one", count - 1, min(self.length(queue), self.largest(queue)))
        if not self.is_idle(device):
            raise ServingError(f"Device {device} was given a batch and is not idle. Ask is_idle before.")
        queues.run(self._pool, self.now, queue, count, device)

    def _take(self, queue: int, request: int) -> None:
        if self._given.get(request) != queue:
            raise ServingError(
                f"A policy put or dropped request {request!r} of queue {queue!r}; expected one that has come for that "
                "queue, and each of them once."
            )
        del self._given[request]

    @staticmethod
    def _check(what: str, value: int, end: int) -> None:
        if not _is_whole(value) or not 0 <= value < end:
            raise ServingError(f"A policy named {what} {value!r}; expected {_numbers(end)}.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int)


def _numbers(end: int) -> str:
    return f"a whole number from 0 to {end - 1}" if end > 0 else "none, as there are none"


class PlainPolicy:
    """The driver's side of such a class: an instance of it for each simulation."""

    def __init__(self, make: Callable[[], Any], path: Path) -> None:
        self._make, self._path = make, path
        self.begin_again()

    def begin_again(self) -> None:
        """Forget all that was learned."""
        self._mine = self._begin()
        # The queue of each request that the policy has neither let in nor dropped.
        self._given: dict[int, int] = {}
        self._woken, self._times = -1, 0

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """As `Policy`."""
        self._given[int(request)] = int(queue)
        with self._told("arrive"):
            self._mine.arrive(self._view(pool, now), int(now), int(queue), int(request), int(deadline))

    def free(self, pool: Ints, now: int, device: int) -> None:
        """As `Policy`."""
        queues.rest(pool, device)
        with self._told("free"):
            self._mine.free(self._view(pool, now), int(now), int(device))

    def wake(self, pool: Ints, now: int) -> None:
        """As `Policy`; nothing if the class has no such method.

        Raises ServingError if it is woken again and again at one moment and decides nothing: time would stand still.
        """
        if hasattr(self._mine, "wake"):
            with self._told("wake"):
                self._mine.wake(self._view(pool, now), int(now))
        self._times = self._times + 1 if now == self._woken and pool[NUM_DECISIONS] == 0 else 0
        self._woken = now
        if self._times > _MOST_WAKES:
            raise ServingError(
                f"{self._path}: next_wake named {now} ns or earlier {_MOST_WAKES} times, and wake decided nothing. "
                "Name a moment that is still to come, or None."
            )

    def next_wake(self, pool: Ints) -> int:
        """As `Policy`; never if the class has no such method, or says None."""
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
                f"What {self._path} makes has no method {missing[0]!r}; expected a class with "
                f"{' and '.join(_METHODS)}. See the page on writing a policy."
            )
        return mine

    @contextmanager
    def _told(self, method: str) -> Iterator[None]:
        with reported(self._path, f"The policy's {method} raised", ServingError):
            yield
