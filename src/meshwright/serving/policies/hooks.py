"""What a policy is: four functions that a driver calls when something has happened.

    arrive(self, pool, now, queue, request, deadline)   a request has come; it is in no queue yet
    free(self, pool, now, device)                       a device has come up, or has ended a batch; it is idle now,
                                                        unless it had its next batch and has begun it
    wake(self, pool, now)                               the moment has come that `next_wake` named
    next_wake(self, pool)                               when to be woken next; `NEVER` if there is no need

A policy of ours is a ``NamedTuple`` of its settings whose methods numba compiles: these functions stand for the methods
in compiled code, by the type of ``self``. Any other object with such methods works in code that is not compiled.
"""

from __future__ import annotations

from typing import Any, Protocol

from numba.extending import overload

from meshwright.serving.policies.pool import Ints


class Policy(Protocol):
    """See the module's docstring. All that it remembers lies in the pool."""

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """A request has come."""
        ...

    def free(self, pool: Ints, now: int, device: int) -> None:
        """A device has come up, or has ended a batch."""
        ...

    def wake(self, pool: Ints, now: int) -> None:
        """The moment has come."""
        ...

    def next_wake(self, pool: Ints) -> int:
        """When to be woken next."""
        ...


def arrive(self: Any, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
    """`Policy.arrive`."""
    self.arrive(pool, now, queue, request, deadline)


def free(self: Any, pool: Ints, now: int, device: int) -> None:
    """`Policy.free`."""
    self.free(pool, now, device)


def wake(self: Any, pool: Ints, now: int) -> None:
    """`Policy.wake`."""
    self.wake(pool, now)


def next_wake(self: Any, pool: Ints) -> int:
    """`Policy.next_wake`."""
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
