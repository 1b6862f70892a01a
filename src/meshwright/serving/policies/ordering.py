"""The order in which a queue is served (`prefer`); how slow devices are, learnt from their batches (`observe`).

Requests are served by deadline, and by priority if not all can run at once. The upper byte of a request is its level, a
number from -4 to 3: the lowest level is the most important, and 0 is the default. A batch takes the most important of
the requests that are due no earlier than the first request (`prefer`). If a request would be refused, a less important
waiting request is refused in its place (`least_important`). While no waiting request has a level, neither takes any
time. The slowness of a device is the time of its batches in thousandths of the modelled latency.
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.pool import (
    BEGAN,
    DEADLINE,
    FREE_AT,
    HEAD,
    LEVEL_BIT,
    LEVELED,
    MASK,
    MEAN,
    NOMINAL,
    NUM_LEVELS,
    PARTS,
    REQUEST,
    SLOWNESS,
    START,
    STEADY,
    TAIL,
    TYPICAL,
    USUAL,
    Ints,
)

# A slowness is at least a tenth of the modelled latency.
_LEAST = 100
# Steps are these fractions of the slowness: it rises as often as it falls at the 98 % quantile.
_RISE, _FALL = 10, 500
# A batch is far beyond the plan if it takes longer by this fraction.
_FAR = 4
# Batches that means are over; the long one outlasts the effect of a late batch.
_MEMORY, _LONG_MEMORY = 32, 256


@compiled
def observe(pool: Ints, now: int, device: int) -> None:
    """Learn a device's slowness from a batch that has ended.

    ``SLOWNESS`` follows a high quantile of batch times. A batch that takes far longer, after `_MEMORY` batches that did
    not, is ignored as a hiccup: its effect would last for fifty more batches. ``TYPICAL`` is the mean of ``SLOWNESS``
    over recent batches of all devices, ``USUAL`` its long-term mean for each device, and ``MEAN`` the mean of batch
    times for each device.
    """
    slowness = pool[pool[SLOWNESS] + device]
    expected = pool[pool[FREE_AT] + device] - pool[pool[BEGAN] + device]
    if expected <= 0:
        return
    observed = max((now - pool[pool[BEGAN] + device]) * slowness // expected, _LEAST)
    # A batch that took very long counts as twice its plan at most.
    pool[pool[MEAN] + device] += (PARTS * min(observed, 2 * slowness) - pool[pool[MEAN] + device]) // _MEMORY
    is_far, steady = observed > slowness + slowness // _FAR, pool[pool[STEADY] + device]
    pool[pool[STEADY] + device] = 0 if is_far else steady + 1
    if not is_far or steady < _MEMORY:
        slowness = _follow(slowness, observed)
    pool[pool[SLOWNESS] + device] = slowness
    pool[pool[FREE_AT] + device] = now
    pool[TYPICAL] += (slowness - pool[TYPICAL]) // _MEMORY
    pool[pool[USUAL] + device] += (PARTS * slowness - pool[pool[USUAL] + device]) // _LONG_MEMORY


@compiled
def virtual_end(pool: Ints, device: int) -> int:
    """Return when (ns) the batch of a virtual device ends: it takes the mean time of the real device's batches.

    The mean is less than the planned time, which nearly all batches keep.
    """
    began, slowness = pool[pool[BEGAN] + device], pool[pool[SLOWNESS] + device]
    return began + (pool[pool[FREE_AT] + device] - began) * (pool[pool[MEAN] + device] // PARTS) // slowness


@compiled
def observe_virtual(pool: Ints, now: int, device: int) -> None:
    """End a batch on a virtual device (a copy of a real one); move its slowness towards the real device's usual one.

    Otherwise one late batch just before the copy was made would affect the whole trial.
    """
    slowness = pool[SLOWNESS] + device
    pool[slowness] = _follow(pool[slowness], pool[pool[USUAL] + device] // PARTS)
    pool[pool[FREE_AT] + device] = now


@compiled
def expect_no_faster(pool: Ints, hoped: int) -> None:
    """Raise ``TYPICAL`` to ``hoped``, the slowness of the fastest device: requests must not wait for a faster one.

    ``TYPICAL`` follows batches only; while all requests are lost, it would not change.
    """
    pool[TYPICAL] = max(pool[TYPICAL], hoped)


@compiled
def trust(pool: Ints, now: int, device: int) -> None:
    """Lower the slowness of an idle device after a request was dropped because of it: the device may have recovered.

    This is done only if the device has been idle for the time of its last batch, so that a wrong try costs no more time
    than the wait did. A device that has just become free is measured by its batches.
    """
    began, end = pool[pool[BEGAN] + device], pool[pool[FREE_AT] + device]
    if now - end >= end - began:
        pool[pool[SLOWNESS] + device] -= max(pool[pool[SLOWNESS] + device] - NOMINAL, 0) // 8


@compiled
def _follow(slowness: int, observed: int) -> int:
    """Return the slowness after a batch: one step towards the observed value."""
    if observed > slowness:
        return int(min(slowness + slowness // _RISE, observed))
    return int(max(slowness - slowness // _FALL, observed))


_NUMBER = (1 << LEVEL_BIT) - 1
_LAST = NUM_LEVELS // 2 - 1


@compiled
def level_of(request: int) -> int:
    """Return the level of a request; a lower one is more important."""
    return request >> LEVEL_BIT


def numbers_of(requests: Ints) -> Ints:
    """Return requests without their levels."""
    return requests & _NUMBER


@compiled
def is_same(request: int, other: int) -> bool:
    """Return whether two requests are the same apart from their levels."""
    return (request ^ other) & _NUMBER == 0


@compiled
def count_level(pool: Ints, queue: int, request: int, change: int) -> None:
    """Update the count of a queue's requests by level; ``change`` is 1 for a request that enters it, -1 that leaves."""
    level = level_of(request)
    if level != 0:
        pool[pool[LEVELED] + NUM_LEVELS * queue] += change
        pool[_count_at(pool, queue, level)] += change


@compiled
def forget_levels(pool: Ints, queue: int) -> None:
    """Reset the counts of a queue that all requests have left."""
    pool[_count_at(pool, queue, 0) : _count_at(pool, queue, 0) + NUM_LEVELS] = 0


@compiled
def _count_at(pool: Ints, queue: int, level: int) -> int:
    """Return the cell that counts a queue's requests of a level; for level 0, those of all other levels."""
    return pool[LEVELED] + NUM_LEVELS * queue + level % NUM_LEVELS


@compiled
def bring_forward(pool: Ints, queue: int, skipped: int, count: int) -> None:
    """Move the ``count`` requests that follow the first ``skipped`` requests of a queue to its front."""
    if skipped > 0:
        head, mask, start = pool[pool[HEAD] + queue], pool[pool[MASK] + queue], pool[pool[START] + queue]
        for column in (pool[DEADLINE] + start, pool[REQUEST] + start):
            kept = np.empty(skipped, np.int64)
            for place in range(skipped):
                kept[place] = pool[column + ((head + place) & mask)]
            for place in range(count):
                pool[column + ((head + place) & mask)] = pool[column + ((head + skipped + place) & mask)]
            for place in range(skipped):
                pool[column + ((head + count + place) & mask)] = kept[place]


@compiled
def prefer(pool: Ints, queue: int, count: int) -> None:
    """Move the ``count`` most important requests to the front, among requests due no earlier than the first request.

    Among equally important requests, those due first are moved; the others stay in the order of their deadlines.
    """
    head, mask = pool[pool[HEAD] + queue], pool[pool[MASK] + queue]
    length = pool[pool[TAIL] + queue] - head
    if pool[_count_at(pool, queue, 0)] == 0 or count >= length:
        return
    deadlines, requests = pool[DEADLINE] + pool[pool[START] + queue], pool[REQUEST] + pool[pool[START] + queue]
    due, waiting = np.empty(length, np.int64), np.empty(length, np.int64)
    # How many requests of each level can be chosen.
    counts = np.zeros(256, np.int64)
    for place in range(length):
        at = (head + place) & mask
        due[place], waiting[place] = pool[deadlines + at], pool[requests + at]
        counts[level_of(waiting[place]) + 128] += due[place] >= due[0]
    # All requests of the levels before the last one are chosen, and the remaining number of that level.
    last, left = 0, count
    while counts[last] < left and last < 255:
        left -= counts[last]
        last += 1
    is_chosen = np.zeros(length, np.bool_)
    chosen = 0
    for place in range(length):
        level = level_of(waiting[place]) + 128
        if due[place] >= due[0] and (level < last or (level == last and left > 0)):
            left -= level == last
            is_chosen[place] = True
            at = (head + chosen) & mask
            pool[deadlines + at], pool[requests + at] = due[place], waiting[place]
            chosen += 1
    behind = chosen
    for place in range(length):
        if not is_chosen[place]:
            # They are in order except for those that `bring_forward` has put back.
            at = behind
            while at > chosen and pool[deadlines + ((head + at - 1) & mask)] > due[place]:
                pool[deadlines + ((head + at) & mask)] = pool[deadlines + ((head + at - 1) & mask)]
                pool[requests + ((head + at) & mask)] = pool[requests + ((head + at - 1) & mask)]
                at -= 1
            pool[deadlines + ((head + at) & mask)], pool[requests + ((head + at) & mask)] = due[place], waiting[place]
            behind += 1


@compiled
def least_important(pool: Ints, queue: int, level: int) -> int:
    """Return the position in a queue of its least important request, if that is less important than ``level``.

    Among equally important requests it is the last one. Returns -1 if no request is less important than ``level``.
    """
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    for least in range(_LAST, level, -1):
        count = pool[_count_at(pool, queue, least)]
        if (tail - head > count) if least == 0 else (count > 0):
            for place in range(tail - 1, head - 1, -1):
                at = pool[REQUEST] + pool[pool[START] + queue] + (place & pool[pool[MASK] + queue])
                if level_of(pool[at]) == least:
                    return place
    return -1
