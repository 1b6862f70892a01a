"""A shard: the queues of some models, numbered from 0, in its own pool.

As in `deferred`, requests wait for a larger batch until their schedulable window starts; but only the rank knows
whether a device is idle. So a shard sends it each queue's window, as the **candidate** to run next, whenever it has
changed, and makes a batch when it is granted a device. In its pool, ``TIMER`` is when the first request of a queue
can no longer be in time even alone; ``READY`` has the queues whose candidate is still to be sent, the most urgent
first: only the newest counts, so a full mailbox blocks nothing. Own cells: for each queue, the requests dropped as late
since the last message to the rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.deferred import begin_batch, typically
from meshwright.serving.policies.heaps import first_of, least_of, put, size_of, take_out
from meshwright.serving.policies.meter import measure_rate
from meshwright.serving.policies.pool import (
    BEGAN,
    DELAY,
    FREE_AT,
    GUARD,
    LATE,
    MODEL,
    MOST,
    NEVER,
    NOMINAL,
    NUM_DEVICES,
    NUM_UP,
    OWN,
    READY,
    SLACK,
    SLOWNESS,
    TIMER,
    TYPICAL,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import (
    drop_late,
    enter,
    first_due,
    latency_of,
    latency_on,
    length_of,
    refuse,
    rest,
)
from meshwright.serving.policies.sharding import CANDIDATE, TAKEN, UNUSED
from meshwright.serving.policies.sharding.mailboxes import room_in, send

# `begin_batch` keeps no devices in reserve.
_NONE_SPARE = 101


def allocate_shard(facts: dict[str, Any], number: int, count: int) -> Ints:
    """Return the pool of shard ``number`` of ``count``: models ``number``, ``number + count``, … of `allocate_pool`."""
    mine = slice(number, None, count)
    latency = np.asarray(facts["latency"])[mine]
    capacity = np.broadcast_to(facts.get("capacity", 1024), len(facts["latency"]))[mine]
    slo = np.broadcast_to(facts["slo"], len(facts["latency"]))[mine]
    own = {**facts, "latency": latency, "slo": slo, "capacity": capacity, "num_own": len(latency), "keep_ends": False}
    pool = allocate_pool(**own)
    # Replaced by the number in the first grant.
    pool[NUM_UP] = facts["num_devices"]
    return pool


@compiled
def take_arrival(pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
    """Enqueue a request unless it would be late."""
    measure_rate(pool, now, queue)
    if deadline - pool[SLACK] < now + pool[DELAY] + latency_of(pool, queue, 1):
        refuse(pool, now, queue, request, LATE)
    elif enter(pool, now, queue, request, deadline):
        _look_again(pool, now, queue)


@compiled
def take_grant(
    pool: Ints,
    now: int,
    queue: int,
    device: int,
    slowness: int,
    typical: int,
    num_up: int,
    hoped: int,
    window: int,
    box: Ints,
) -> None:
    """Start a batch on the granted device, or return it to the rank."""
    pool[pool[SLOWNESS] + device] = slowness
    pool[TYPICAL], pool[NUM_UP] = typical, num_up
    _drop_late(pool, now, queue, hoped)
    if length_of(pool, queue) > 0 and now + pool[DELAY] + latency_on(pool, queue, 1, device) <= first_due(pool, queue):
        rest(pool, device)
        begin_batch(pool, now, queue, device, _NONE_SPARE, window)
        send(box, TAKEN, now, queue, device, pool[pool[BEGAN] + device], pool[pool[FREE_AT] + device], 0, 0)
    else:
        send(box, UNUSED, now, queue, device, 0, 0, 0, 0)
    _look_again(pool, now, queue)


@compiled
def wake_shard(pool: Ints, now: int) -> None:
    """Handle a queue whose first request can no longer be in time."""
    if least_of(pool, TIMER, NEVER) <= now:
        _look_again(pool, now, first_of(pool, TIMER))


@compiled
def tell_candidates(pool: Ints, now: int, box: Ints) -> None:
    """Send changed candidates to the rank, leaving the room that answers to all grants may need."""
    while size_of(pool, READY) > 0 and room_in(box) > pool[NUM_DEVICES]:
        queue = first_of(pool, READY)
        take_out(pool, READY, queue)
        lost, length = pool[OWN] + queue, length_of(pool, queue)
        if length == 0:
            send(box, CANDIDATE, now, queue, 0, 0, 0, 0, pool[lost])
        else:
            due = first_due(pool, queue)
            size = min(length, pool[pool[MOST] + pool[pool[MODEL] + queue]])
            begin = due - pool[DELAY] - pool[GUARD] - typically(pool, queue, size + 1)
            end = due - pool[DELAY] - typically(pool, queue, size)
            send(box, CANDIDATE, now, queue, begin, end, size, due, pool[lost])
        pool[lost] = 0


@compiled
def next_of_shard(pool: Ints) -> int:
    """Return when a shard must be woken."""
    return least_of(pool, TIMER, NEVER)


@compiled
def _look_again(pool: Ints, now: int, queue: int) -> None:
    """Update a changed queue: its timer, and its candidate, which is to be sent."""
    _drop_late(pool, now, queue, NOMINAL)
    if length_of(pool, queue) == 0:
        take_out(pool, TIMER, queue)
        put(pool, READY, queue, now)
    else:
        due = first_due(pool, queue)
        put(pool, TIMER, queue, due - pool[DELAY] - latency_of(pool, queue, 1) + 1)
        put(pool, READY, queue, due)


@compiled
def _drop_late(pool: Ints, now: int, queue: int, slowness: int) -> None:
    pool[pool[OWN] + queue] += drop_late(pool, now, queue, now + pool[DELAY], slowness)
