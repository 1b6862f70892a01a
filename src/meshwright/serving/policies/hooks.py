"""The interface of a policy: four functions that a driver calls at events.

    arrive(self, pool, now, queue, request, deadline)   a request has arrived; it is not in a queue yet
    free(self, pool, now, device)                       a device has come up, or has ended a batch; it is idle now,
                                                        unless it had a next batch and has started it
    wake(self, pool, now)                               the moment that `next_wake` returned has come
    next_wake(self, pool)                               return when to be woken next; `NEVER` if not needed

Meshwright's policies are a ``NamedTuple`` of settings whose methods numba compiles: in compiled code, these functions
call the methods by the type of ``self``. Any other object with such methods works in code that is not compiled.
"""

from __future__ import annotations

from typing import Any, Protocol

from numba.extending import overload

from meshwright.serving.policies.pool import Ints


class Policy(Protocol):
    """A policy: four functions, called at events, that decide which batches run. All state is kept in the pool.

    All moments are in ns. The functions decide by the operations of `queues`: enqueue, drop and run requests.
    """

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Decide about a request of queue ``queue`` that has arrived at ``now``: enqueue it, drop it or run it."""
        ...

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Decide what a device runs next that has come up, or has ended a batch, at ``now``."""
        ...

    def wake(self, pool: Ints, now: int) -> None:
        """Decide at the moment that `next_wake` returned, which is now."""
        ...

    def next_wake(self, pool: Ints) -> int:
        """Return when to be woken next (ns); `NEVER` if not needed."""
        ...


def arrive(self: Any, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
    """Call `Policy.arrive`."""
    self.arrive(pool, now, queue, request, deadline)


def free(self: Any, pool: Ints, now: int, device: int) -> None:
    """Call `Policy.free`."""
    self.free(pool, now, device)


def wake(self: Any, pool: Ints, now: int) -> None:
    """Call `Policy.wake`."""
    self.wake(pool, now)


def next_wake(self: Any, pool: Ints) -> int:
    """Call `Policy.next_wake`."""
    return int(self.next_wake(pool))


@overload(arrive, strict=False)
def _arrive(self: Any, pool: Any, now: Any, queue: Any, request: Any, deadline: Any) -> Any:
    return self.instance_class.arrive


@overload(free, strict=False)
def _free(self: Any, pool: Any, now: Any, device: Any) -> Any:
    return self.instance_class.free


@overload(wake, strict=False)
def _wake(self: Any, pool: Any, now: Any) -> Any:
    return self.instance_class.wake


@overload(next_wake, strict=False)
def _next_wake(self: Any, pool: Any) -> Any:
    return self.instance_class.next_wake
