"""Clockwork (OSDI 2020): one controller plans what every device does a little ahead, and only what will be in time.

A device is given its next batch up to ``ahead`` microseconds before it is free. Batches have sizes that models were
compiled for, the powers of two. The queue whose first deadline, less the latency of its largest batch, comes first is
chosen, and of it the largest batch of requests that are all in time, passing over earlier ones that are not (a smaller
batch may serve these). Requests that would be late even alone are dropped when their queue's turn comes.

Constants of the published controller that are the pool's here: what passes between a decision and its begin (1 ms
there), and how long before deadlines batches are planned to end (5 ms there). Models are not loaded and evicted, since
devices hold all models of their pool.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.cost.compiled import compiled
from meshwright.serving.policies.heaps import cells_of_heap, first_of, lay_heap, least_of, put, size_of, take_out
from meshwright.serving.policies.pool import (
    BUSY,
    DEVICE,
    FREE_AT,
    HEAD,
    MODEL,
    MOST,
    NEVER,
    OWN,
    READY,
    REST,
    TAIL,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import (
    begin_on,
    bring_forward,
    deadline_at,
    drop_late,
    enter,
    forget_down,
    idle_device,
    latency_of,
    length_of,
    rest,
    run,
)


class Clockwork(NamedTuple):
    """Settings: ``ahead``, microseconds for which a device is planned before it is free."""

    ahead: int = 10_000

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """A pool with a heap of devices by when they are nearly done."""
        pool = allocate_pool(**facts, num_own=cells_of_heap(facts["num_devices"]))
        lay_heap(pool, int(pool[OWN]), facts["num_devices"])
        return pool

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Let it in; plan for a device that is free, or soon will be."""
        if enter(pool, now, queue, request, deadline):
            _rank(pool, queue)
            _plan(pool, now, self.ahead * 1000)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Plan for a device that is idle; for one that has begun its next batch, when it is nearly done."""
        if pool[pool[FREE_AT] + device] > now and pool[pool[DEVICE] + device] == BUSY:
            _expect(pool, device, self.ahead * 1000)
        else:
            take_out(pool, pool[OWN], device)
            rest(pool, device)
        _plan(pool, now, self.ahead * 1000)

    def wake(self, pool: Ints, now: int) -> None:
        """A device is nearly done."""
        _plan(pool, now, self.ahead * 1000)

    def next_wake(self, pool: Ints) -> int:
        """When the next device is nearly done, if anything waits."""
        return least_of(pool, pool[OWN], NEVER) if size_of(pool, READY) > 0 else NEVER


@compiled
def _expect(pool: Ints, device: int, ahead: int) -> None:
    put(pool, pool[OWN], device, pool[pool[FREE_AT] + device] - ahead)


@compiled
def _rank(pool: Ints, queue: int) -> None:
    """Rank a queue by its first deadline less the latency of its largest batch."""
    if length_of(pool, queue) == 0:
        take_out(pool, READY, queue)
        return
    first = deadline_at(pool, queue, pool[pool[HEAD] + queue])
    put(pool, READY, queue, first - latency_of(pool, queue, _compiled_size(pool, queue)))


@compiled
def _compiled_size(pool: Ints, queue: int) -> int:
    """The largest size of batch, a power of two, for which enough requests wait."""
    size = 1
    while 2 * size <= min(length_of(pool, queue), pool[pool[MOST] + pool[pool[MODEL] + queue]]):
        size *= 2
    return size


@compiled
def _plan(pool: Ints, now: int, ahead: int) -> None:
    """Give batches to devices that are idle or nearly done, as long as there are both."""
    while size_of(pool, READY) > 0:
        forget_down(pool, pool[OWN])
        is_idle = size_of(pool, REST) > 0
        if not is_idle and least_of(pool, pool[OWN], NEVER) > now:
            return
        device = idle_device(pool) if is_idle else first_of(pool, pool[OWN])
        queue = first_of(pool, READY)
        begin = begin_on(pool, device, now)
        drop_late(pool, now, queue, begin)
        if length_of(pool, queue) > 0:
            batch, skipped = _largest_compiled(pool, queue, begin)
            bring_forward(pool, queue, skipped, batch)
            run(pool, now, queue, batch, device)
            if is_idle:
                _expect(pool, device, ahead)
            else:
                take_out(pool, pool[OWN], device)
        _rank(pool, queue)


@compiled
def _largest_compiled(pool: Ints, queue: int, begin: int) -> tuple[int, int]:
    """The largest power of two for which there are so many requests in time, and how many earlier ones are not."""
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    size = _compiled_size(pool, queue)
    while size > 1:
        end = begin + latency_of(pool, queue, size)
        at = head
        while at + size <= tail and deadline_at(pool, queue, at) < end:
            at += 1
        if at + size <= tail:
            return size, at - head
        size //= 2
    return 1, 0
