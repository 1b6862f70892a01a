"""The order in which a queue is served: by deadline, and by priority where not all requests can run at once.

The upper byte of a request is its level, a number from -4 to 3: the lowest is the most important, and 0 is the default.
A batch takes the most important of the requests that could run as one batch with the first request (`prefer`), so that
these do not grow old; and where a request is refused, a less important one that waits is refused in its place
(`least_important`). While no waiting request has a level, neither takes any time.
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.pool import (
    DEADLINE,
    HEAD,
    LEVEL_BIT,
    LEVELED,
    MASK,
    NUM_LEVELS,
    REQUEST,
    START,
    TAIL,
    Ints,
)

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
    """Count a request that has entered a queue (1), or left it (-1)."""
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
    """Move ``count`` requests after the first ``skipped`` ones in front of these."""
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
    """Move the ``count`` most important requests to the front, among those due no earlier than the first request.

    Ties go to those due first; all others stay in the order of their deadlines.
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
    """Return the place of the least important request below this level, the last due on a tie; or -1."""
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    for least in range(_LAST, level, -1):
        count = pool[_count_at(pool, queue, least)]
        if (tail - head > count) if least == 0 else (count > 0):
            for place in range(tail - 1, head - 1, -1):
                at = pool[REQUEST] + pool[pool[START] + queue] + (place & pool[pool[MASK] + queue])
                if level_of(pool[at]) == least:
                    return place
    return -1
