"""The rank: the devices, and for each queue of all shards the batch that it could run next.

A candidate whose window has started is granted an idle device; among several, the one whose window ends first
(`deferred`). Until its shard has answered, candidates of that queue are outdated and ignored. Queue q of all is queue
q // S of shard q % S. In the rank's pool the queues hold no requests: ``TIMER`` is the start of windows, ``READY`` the
end of those that have started. If the pool keeps ends (``END``), a device is taken to be free at the end that its shard
announced, as in Symphony; otherwise it is free when the driver says so. Own cells: for each queue the end of its
window, when its first request is due, and whether it has been granted a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.heaps import first_of, is_in, least_of, put, size_of, take_out
from meshwright.serving.policies.pool import (
    BEGAN,
    BUSY,
    DELAY,
    DEVICE,
    DOWN,
    END,
    FREE_AT,
    KEEPS_ENDS,
    NEVER,
    NOMINAL,
    NUM_IDLE,
    NUM_QUEUES,
    NUM_UP,
    OWN,
    READY,
    REST,
    SLOWNESS,
    TIMER,
    TYPICAL,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import idle_device, latency_of, latency_on, least_slowness, rest
from meshwright.serving.policies.sharding import CANDIDATE, FREE, GRANT, TAKEN, UNUSED
from meshwright.serving.policies.sharding.mailboxes import send
from meshwright.serving.policies.slowness import expect_no_faster, observe, trust

# Columns of own cells, with a cell for each queue.
_WINDOW_END, _DUE, _IS_GRANTED = range(3)
CELLS_OF_QUEUE = 3


def allocate_rank(facts: dict[str, Any], num_more: int = 0, *, keep_ends: bool = False) -> Ints:
    """Return the rank's pool for the arguments of `allocate_pool`; ``num_more`` own cells follow those that it uses."""
    num_own = CELLS_OF_QUEUE * len(np.asarray(facts["latency"])) + num_more
    return allocate_pool(**{**facts, "num_own": num_own, "keep_ends": keep_ends})


@compiled
def take_rank_row(pool: Ints, row: Ints, now: int, boxes: Ints) -> None:
    """Handle a message, with the queue's number across shards, or a free device; ``boxes``: a mailbox to each shard."""
    kind, queue, device = row[0], row[2], row[3]
    if kind == CANDIDATE:
        if row[7] > 0 and idle_device(pool) >= 0:
            trust(pool, now, idle_device(pool))
        if pool[_cell(pool, _IS_GRANTED, queue)] == 0:
            _take_candidate(pool, now, queue, row[3], row[4], row[5], row[6], boxes)
            _match(pool, now, boxes)
    elif kind == TAKEN:
        pool[_cell(pool, _IS_GRANTED, queue)] = 0
        pool[pool[BEGAN] + device] = row[4]
        pool[pool[FREE_AT] + device] = row[5]
        if pool[KEEPS_ENDS]:
            put(pool, END, device, row[5])
    elif kind == UNUSED:
        pool[_cell(pool, _IS_GRANTED, queue)] = 0
        if pool[pool[DEVICE] + device] != DOWN:
            _use(pool, now, device, boxes)
    elif kind == FREE:
        observe(pool, now, device)
        _use(pool, now, device, boxes)


@compiled
def wake_rank(pool: Ints, now: int, boxes: Ints) -> None:
    """Handle a device that is taken to be free, or the start of a window."""
    if least_of(pool, END, NEVER) <= now:
        _use(pool, now, first_of(pool, END), boxes)
    elif least_of(pool, TIMER, NEVER) <= now:
        _offer(pool, now, first_of(pool, TIMER), boxes)


@compiled
def next_of_rank(pool: Ints) -> int:
    """Return when the rank must be woken."""
    return min(least_of(pool, END, NEVER), least_of(pool, TIMER, NEVER))


@compiled
def _take_candidate(pool: Ints, now: int, queue: int, begin: int, end: int, size: int, due: int, boxes: Ints) -> None:
    """Update the candidate of a queue; one that was ready stays ready."""
    if size == 0:
        take_out(pool, TIMER, queue)
        take_out(pool, READY, queue)
        return
    pool[_cell(pool, _WINDOW_END, queue)], pool[_cell(pool, _DUE, queue)] = end, due
    if begin <= now or is_in(pool, READY, queue):
        _offer(pool, now, queue, boxes)
    else:
        put(pool, TIMER, queue, begin)


@compiled
def _use(pool: Ints, now: int, device: int, boxes: Ints) -> None:
    """Mark a device as idle, and grant it if a candidate is ready."""
    rest(pool, device)
    _match(pool, now, boxes)


@compiled
def _match(pool: Ints, now: int, boxes: Ints) -> None:
    """Grant idle devices to the ready candidates whose windows end first."""
    while size_of(pool, READY) > 0 and size_of(pool, REST) > 0:
        if not _offer(pool, now, first_of(pool, READY), boxes):
            return


@compiled
def _offer(pool: Ints, now: int, queue: int, boxes: Ints) -> bool:
    """Grant a ready candidate an idle device, unless that is too slow for its first request; return whether it was.

    A request that all devices are too slow for is dropped by its shard, which therefore gets the grant: the requests
    behind it may be in time.
    """
    take_out(pool, TIMER, queue)
    device, begin, due = idle_device(pool), now + pool[DELAY], pool[_cell(pool, _DUE, queue)]
    hoped = least_slowness(pool, queue, begin, due)
    expect_no_faster(pool, hoped)
    soonest = begin + latency_of(pool, queue, 1) * hoped // NOMINAL
    if device < 0 or soonest <= due < begin + latency_on(pool, queue, 1, device):
        put(pool, READY, queue, pool[_cell(pool, _WINDOW_END, queue)])
        return False
    take_out(pool, READY, queue)
    take_out(pool, REST, device)
    pool[NUM_IDLE] -= 1
    pool[pool[DEVICE] + device] = BUSY
    pool[_cell(pool, _IS_GRANTED, queue)] = 1
    slowness, shards = pool[pool[SLOWNESS] + device], len(boxes)
    box = boxes[queue % shards]
    send(box, GRANT, now, queue // shards, device, slowness, pool[TYPICAL], pool[NUM_UP], hoped)
    return True


@compiled
def _cell(pool: Ints, column: int, queue: int) -> int:
    return pool[OWN] + column * pool[NUM_QUEUES] + queue
