"""Deferred batches: a queue waits for a larger batch while its first request allows it, and no longer.

With l(b) the latency of a batch, d the deadline of a queue's first request (less the slack), its **schedulable window**
is

    from  d − l(b + 1)    after this, one more request could not join: waiting is useless
    to    d − l(b)        until then the batch can start and be in time

A queue is **ready** from the start of its window on (on a real clock a guard earlier, since timers are late), or when
it holds the largest batch. Ready queues get devices in order of the ends of their windows. Symphony (arXiv 2308.07470,
sections 3 and 4) waits for the window; eager batching (as Clockwork, without its central plan) runs waiting requests on
any idle device. Between them, ``spare`` is the share of devices, in percent, that must stay idle for a batch to start
without waiting: 0 is eager, more than 100 is Symphony. Up to 100, nothing waits while all devices are idle, so that a
single device answers at once, too.

The target is the batch size that staggered devices could serve at the measured rate. When a batch starts, requests
that would be late even alone are dropped. If the largest batch that is in time is smaller than ``window`` percent of
the target, the oldest requests are dropped until a batch of that size fits, unless other idle devices can serve them.
With ``admit``, a request is refused on arrival if a batch of the target's size would be late for it after ``admit``
percent of all queued work, divided evenly over the devices. Latencies are the observed ones of the devices
(`slowness`): a queue waits by their typical slowness, and a batch is sized for the device that runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.compiled import compiled
from meshwright.serving.policies.meter import measure_rate
from meshwright.serving.policies.ordering import expect_no_faster, observe, trust
from meshwright.serving.policies.pool import (
    CROWDED,
    DELAY,
    GUARD,
    HEAD,
    LATE,
    MODEL,
    MOST,
    NEVER,
    NOMINAL,
    NUM_IDLE,
    NUM_UP,
    READY,
    REST,
    SACRIFICED,
    SLACK,
    SLOWNESS,
    TARGET,
    TIMER,
    TYPICAL,
    WORK,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import (
    begin_on,
    deadline_at,
    displace,
    drop,
    drop_late,
    enter,
    first_due,
    first_end,
    first_of,
    idle_device,
    is_in,
    largest_batch,
    latency_of,
    latency_on,
    least_of,
    least_slowness,
    length_of,
    put,
    refuse,
    rest,
    run,
    size_of,
    skip_for,
    take_out,
)


class Deferred(NamedTuple):
    """The policy of deferred batches. The module describes ``spare``, ``window`` and ``admit``, all in percent."""

    spare: int = 101
    window: int = 100
    admit: int = 0

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return a pool; with ``admit`` it tracks when devices will be free."""
        return allocate_pool(**facts, keep_ends=self.admit > 0)

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Enqueue the request unless it would be late; its queue may become ready."""
        admit_request(pool, now, queue, request, deadline, self.spare, self.window, self.admit)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Run the ready queue whose window ends first; with spare devices, also a queue that waits for its window."""
        observe(pool, now, device)
        use_device(pool, now, device, self.spare, self.window)

    def wake(self, pool: Ints, now: int) -> None:
        """Handle the start of a window, or a first request that can no longer be in time."""
        if least_of(pool, TIMER, NEVER) <= now:
            settle(pool, now, first_of(pool, TIMER), self.spare, self.window)

    def next_wake(self, pool: Ints) -> int:
        """Return when (ns) the next window starts, or the next request is lost."""
        return least_of(pool, TIMER, NEVER)


@compiled
def admit_request(
    pool: Ints, now: int, queue: int, request: int, deadline: int, spare: int, window: int, admit: int
) -> None:
    """Enqueue a request unless it would be late; its queue may become ready."""
    measure_rate(pool, now, queue)
    if deadline - pool[SLACK] < now + pool[DELAY] + latency_of(pool, queue, 1):
        refuse(pool, now, queue, request, LATE)
    elif (
        admit > 0 and is_crowded(pool, now, queue, deadline, admit) and not displace(pool, now, queue, request, CROWDED)
    ):
        return
    elif enter(pool, now, queue, request, deadline):
        settle(pool, now, queue, spare, window)


@compiled
def use_device(pool: Ints, now: int, device: int, spare: int, window: int) -> None:
    """Run the ready queue whose window ends first on an idle device, or, with spare devices, a waiting queue."""
    rest(pool, device)
    # A queue whose requests were all late leaves the device to other queues.
    while size_of(pool, READY) > 0 and size_of(pool, REST) > 0:
        queue = first_of(pool, READY)
        if not settle(pool, now, queue, spare, window) and is_in(pool, READY, queue):
            return
    while size_of(pool, TIMER) > 0 and _has_spare(pool, spare):
        queue = first_of(pool, TIMER)
        if not settle(pool, now, queue, spare, window) and is_in(pool, TIMER, queue):
            return


@compiled
def settle(pool: Ints, now: int, queue: int, spare: int, window: int) -> bool:
    """Update a queue: run it, mark it as ready, or let it wait for its window. Returns whether a batch was started."""
    has_run = False
    while True:
        device, begin, hoped = idle_device(pool), now + pool[DELAY], NOMINAL
        # Only for slow devices, as this takes time (6 % of a simulation of 100 models by Symphony, 2026-11-26).
        if device >= 0 and pool[pool[SLOWNESS] + device] > NOMINAL:
            hoped = least_slowness(pool, queue, begin, first_due(pool, queue))
            expect_no_faster(pool, hoped)
        if drop_late(pool, now, queue, begin, hoped) > 0 and device >= 0:
            trust(pool, now, device)
        length = length_of(pool, queue)
        if length == 0:
            take_out(pool, TIMER, queue)
            take_out(pool, READY, queue)
            return has_run
        deadline = deadline_at(pool, queue, pool[pool[HEAD] + queue]) - pool[DELAY]
        batch = min(length, pool[pool[MOST] + pool[pool[MODEL] + queue]])
        window_begin = deadline - pool[GUARD] - typically(pool, queue, batch + 1)
        is_ready = window_begin <= now or is_in(pool, READY, queue)
        if device >= 0 and (is_ready or _has_spare(pool, spare)) and _is_in_time(pool, now, queue, device):
            take_out(pool, READY, queue)
            begin_batch(pool, now, queue, device, spare, window)
            has_run = True
        elif is_ready:
            # The timer drops requests that can no longer be in time even alone.
            put(pool, TIMER, queue, deadline - latency_of(pool, queue, 1) + 1)
            put(pool, READY, queue, deadline - typically(pool, queue, batch))
            return has_run
        else:
            put(pool, TIMER, queue, window_begin)
            return has_run


@compiled
def typically(pool: Ints, queue: int, batch: int) -> int:
    """Return the time (ns) of a batch on a device of typical slowness; `NEVER` for a batch that is too large."""
    latency = latency_of(pool, queue, batch)
    return latency * pool[TYPICAL] // NOMINAL if latency < NEVER else NEVER


@compiled
def _is_in_time(pool: Ints, now: int, queue: int, device: int) -> bool:
    """Return whether a (slow) device can still answer the first request in time, alone."""
    end = begin_on(pool, device, now) + latency_on(pool, queue, 1, device)
    return end <= deadline_at(pool, queue, pool[pool[HEAD] + queue])


@compiled
def is_crowded(pool: Ints, now: int, queue: int, deadline: int, admit: int) -> bool:
    """Return whether a request would be late behind all queued work, divided evenly among all devices.

    The request is assumed to be in a batch of the target's size. If it were assumed to be in a batch with the waiting
    requests only, the first request of a queue would force small batches on all later ones. Only if its deadline is too
    short for a batch of the target's size, the waiting requests count.
    """
    begin = first_end(pool, now) + pool[DELAY] + pool[GUARD] + pool[WORK] * admit // (100 * max(pool[NUM_UP], 1))
    latest, batch = deadline - pool[SLACK], max(pool[pool[TARGET] + queue], 1)
    if latest - now < latency_of(pool, queue, batch):
        batch = min(length_of(pool, queue) + 1, batch)
    return begin + latency_of(pool, queue, batch) > latest


@compiled
def _has_spare(pool: Ints, spare: int) -> bool:
    idle, up = pool[NUM_IDLE], pool[NUM_UP]
    return bool(idle > 0 and (100 * (idle - 1) >= spare * up or (idle == up and spare <= 100)))


@compiled
def begin_batch(pool: Ints, now: int, queue: int, device: int, spare: int, window: int) -> None:
    """Run the largest batch that is in time on an idle device; its first request could run alone.

    First requests are dropped to allow a larger batch, unless other idle devices could serve the rest.
    """
    begin, slowness = begin_on(pool, device, now), pool[pool[SLOWNESS] + device]
    batch = largest_batch(pool, queue, begin, slowness)
    target = window * pool[pool[TARGET] + queue] // 100
    if batch < target and not (pool[NUM_IDLE] > 1 and _has_spare(pool, spare)):
        skipped = skip_for(pool, queue, begin, target, slowness)
        if skipped > 0:
            drop(pool, now, queue, skipped, SACRIFICED)
            batch = largest_batch(pool, queue, begin, slowness)
    run(pool, now, queue, batch, device)
