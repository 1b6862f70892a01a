"""Batching that never looks at deadlines, as most servers do it: `Timeouts` (Triton, MLServer, Ray Serve) and `Aimd`.

Requests are answered first come, first served; those whose deadline has passed are dropped when their turn comes.

`Timeouts` waits until ``preferred`` requests are there, or the first one has waited for ``wait`` percent of its SLO; it
then runs all that wait, up to ``most``. In Triton the two sizes are settings of their own (preferred_batch_size and
max_batch_size); in MLServer, LitServe and Ray Serve the one that triggers is the largest, too: there ``most`` is
``preferred``.
`Aimd` (Clipper, NSDI 2017, section 4.3.1) runs what there is, up to a limit for each queue: a batch of that limit that
took less than the SLO raises it by one, one that took longer lowers it by a tenth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.compiled import compiled
from meshwright.serving.policies.heaps import first_of, is_in, least_of, put, size_of, take_out
from meshwright.serving.policies.pool import (
    DELAY,
    FREE_AT,
    HEAD,
    LATE,
    MODEL,
    MOST,
    NEVER,
    NUM_QUEUES,
    OWN,
    READY,
    REST,
    SLACK,
    SLO,
    TAIL,
    TIMER,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import deadline_at, drop, enter, idle_device, latency_of, length_of, rest, run


class Timeouts(NamedTuple):
    """Settings: ``preferred`` requests in a batch (0: as many as take half the SLO); ``wait``, percent of the SLO.

    ``most`` requests are in the largest batch (0: as many as take the whole SLO).
    """

    preferred: int = 0
    wait: int = 25
    most: int = 0

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Let it in; its queue may be full enough now."""
        if enter(pool, now, queue, request, deadline):
            _see_to(pool, now, queue, self.preferred, self.wait, self.most)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Run the queue that has waited longest of those that need not wait."""
        rest(pool, device)
        while size_of(pool, READY) > 0 and size_of(pool, REST) > 0:
            _see_to(pool, now, first_of(pool, READY), self.preferred, self.wait, self.most)

    def wake(self, pool: Ints, now: int) -> None:
        """A first request has waited long enough."""
        if least_of(pool, TIMER, NEVER) <= now:
            _see_to(pool, now, first_of(pool, TIMER), self.preferred, self.wait, self.most)

    def next_wake(self, pool: Ints) -> int:
        """When the next first request has waited long enough."""
        return least_of(pool, TIMER, NEVER)


class Aimd(NamedTuple):
    """Settings: ``start``, the first limit."""

    start: int = 1

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """A pool with a limit for each queue, in thousandths, and for each device its queue, batch and begin."""
        num_queues = len(facts["latency"])
        pool = allocate_pool(**facts, num_own=num_queues + 3 * facts["num_devices"])
        pool[pool[OWN] : pool[OWN] + num_queues] = 1000 * self.start
        return pool

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Let it in; an idle device runs it at once."""
        if enter(pool, now, queue, request, deadline):
            put(pool, READY, queue, deadline_at(pool, queue, pool[pool[HEAD] + queue]))
            _run_limited(pool, now)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Learn from the batch that has ended; run the queue that has waited longest."""
        _learn(pool, now, device)
        rest(pool, device)
        _run_limited(pool, now)

    def wake(self, pool: Ints, now: int) -> None:
        """Nothing waits for a moment."""

    def next_wake(self, pool: Ints) -> int:
        """Never."""
        return NEVER


@compiled
def _drop_passed(pool: Ints, now: int, queue: int) -> None:
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    at = head
    while at < tail and deadline_at(pool, queue, at) + pool[SLACK] < now:
        at += 1
    drop(pool, now, queue, at - head, LATE)


@compiled
def _see_to(pool: Ints, now: int, queue: int, preferred: int, wait: int, largest: int) -> None:
    while True:
        _drop_passed(pool, now, queue)
        length = length_of(pool, queue)
        if length == 0:
            take_out(pool, TIMER, queue)
            take_out(pool, READY, queue)
            return
        model = pool[pool[MODEL] + queue]
        slo, most = pool[pool[SLO] + model], pool[pool[MOST] + model]
        if largest > 0:
            most = min(most, largest)
        enough = min(preferred, most)
        if enough == 0:
            enough = most
            while enough > 1 and 2 * latency_of(pool, queue, enough) > slo:
                enough -= 1
        deadline = deadline_at(pool, queue, pool[pool[HEAD] + queue]) + pool[SLACK]
        waited = deadline - slo + min(wait, NEVER // slo) * slo // 100
        if not (is_in(pool, READY, queue) or length >= enough or waited <= now):
            put(pool, TIMER, queue, waited)
            return
        take_out(pool, TIMER, queue)
        if size_of(pool, REST) == 0:
            put(pool, READY, queue, deadline)
            return
        take_out(pool, READY, queue)
        run(pool, now, queue, min(length, most), idle_device(pool))


@compiled
def _run_limited(pool: Ints, now: int) -> None:
    while size_of(pool, READY) > 0 and size_of(pool, REST) > 0:
        queue = first_of(pool, READY)
        _drop_passed(pool, now, queue)
        length = length_of(pool, queue)
        if length > 0:
            limit = max(pool[pool[OWN] + queue] // 1000, 1)
            batch = min(length, limit, pool[pool[MOST] + pool[pool[MODEL] + queue]])
            device = idle_device(pool)
            own = pool[OWN] + pool[NUM_QUEUES] + 3 * device
            pool[own], pool[own + 1], pool[own + 2] = queue, batch, now
            run(pool, now, queue, batch, device)
        if length_of(pool, queue) > 0:
            put(pool, READY, queue, deadline_at(pool, queue, pool[pool[HEAD] + queue]))
        else:
            take_out(pool, READY, queue)


@compiled
def _learn(pool: Ints, now: int, device: int) -> None:
    own = pool[OWN] + pool[NUM_QUEUES] + 3 * device
    queue, batch, begin = pool[own], pool[own + 1], pool[own + 2]
    pool[own + 1] = 0
    # A device that has failed meanwhile is free from now on, and says nothing about its batch.
    if pool[pool[FREE_AT] + device] != begin + pool[DELAY] + latency_of(pool, queue, batch):
        return
    limit = pool[OWN] + queue
    if batch > 0 and now - begin > pool[pool[SLO] + pool[pool[MODEL] + queue]]:
        pool[limit] = max(pool[limit] * 9 // 10, 1000)
    elif batch >= pool[limit] // 1000 and batch > 0:
        pool[limit] += 1000
