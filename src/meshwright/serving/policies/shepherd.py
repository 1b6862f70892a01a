"""Shepherd's online algorithm FLEX (NSDI 2023): the largest batch first, and preemption by much larger ones.

A free device runs the largest batch, over all models, whose requests are in time. When a request arrives and no device
is idle, the batch of its queue preempts the smallest running batch if it has at least ``factor`` percent of that
batch's size; preempted requests are resubmitted.

The published pseudocode merges preempted requests with the waiting ones of the same queue; here they are resubmitted
first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.compiled import compiled
from meshwright.serving.policies.pool import (
    DELAY,
    HEAD,
    NEVER,
    OWN,
    READY,
    REST,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import (
    begin_on,
    cells_of_heap,
    deadline_at,
    drop_late,
    enter,
    first_of,
    forget_down,
    idle_device,
    largest_batch,
    lay_heap,
    length_of,
    preempt,
    put,
    rest,
    run,
    size_of,
    take_out,
)
from meshwright.spec import ServingError


class Shepherd(NamedTuple):
    """The policy Shepherd. ``factor``: the least size of a batch that preempts another, in percent of the other."""

    factor: int = 300

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return a pool with a heap of busy devices by the size of their batch.

        Raises ServingError for a factor of at most 100, by which two batches would preempt each other for ever.
        """
        if self.factor <= 100:
            raise ServingError(f"shepherd:factor={self.factor}: expected a factor of more than 100 (percent).")
        pool = allocate_pool(**facts, num_own=cells_of_heap(facts["num_devices"]))
        lay_heap(pool, int(pool[OWN]), facts["num_devices"])
        return pool

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Enqueue the request; run its queue on an idle device, or in place of a much smaller batch."""
        if not enter(pool, now, queue, request, deadline):
            return
        put(pool, READY, queue, deadline_at(pool, queue, pool[pool[HEAD] + queue]))
        forget_down(pool, pool[OWN])
        if size_of(pool, REST) > 0:
            _run_largest(pool, now, queue)
        elif size_of(pool, pool[OWN]) > 0:
            device = first_of(pool, pool[OWN])
            running = pool[pool[pool[OWN]] + device]
            if 100 * length_of(pool, queue) >= self.factor * running:
                drop_late(pool, now, queue, now + pool[DELAY])
                if length_of(pool, queue) > 0:
                    if 100 * largest_batch(pool, queue, now + pool[DELAY]) >= self.factor * running:
                        preempt(pool, now, device)
                        take_out(pool, pool[OWN], device)
                        _run_largest(pool, now, queue)
                else:
                    take_out(pool, READY, queue)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Run the largest batch of all queues."""
        take_out(pool, pool[OWN], device)
        rest(pool, device)
        best, most, place = -1, 0, 0
        while place < size_of(pool, READY):
            queue = pool[pool[READY + 1] + 1 + place]
            drop_late(pool, now, queue, now + pool[DELAY])
            if length_of(pool, queue) == 0:
                take_out(pool, READY, queue)
                best, most, place = -1, 0, 0
                continue
            batch = largest_batch(pool, queue, now + pool[DELAY])
            if batch > most:
                best, most = queue, batch
            place += 1
        if best >= 0:
            _run_largest(pool, now, best)

    def wake(self, pool: Ints, now: int) -> None:
        """Do nothing: no timer is used."""

    def next_wake(self, pool: Ints) -> int:
        """Return `NEVER`."""
        return NEVER


@compiled
def _run_largest(pool: Ints, now: int, queue: int) -> None:
    device = idle_device(pool)
    begin = begin_on(pool, device, now)
    drop_late(pool, now, queue, begin)
    if length_of(pool, queue) > 0:
        batch = largest_batch(pool, queue, begin)
        run(pool, now, queue, batch, device)
        put(pool, pool[OWN], device, batch)
    if length_of(pool, queue) == 0:
        take_out(pool, READY, queue)
    else:
        put(pool, READY, queue, deadline_at(pool, queue, pool[pool[HEAD] + queue]))
