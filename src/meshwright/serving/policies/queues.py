"""Operations of policies on a pool: enqueue, drop and run requests, with decisions for the driver; a heap of items.

All moments (``now``, ``begin``, deadlines) and durations are in ns.
"""

from __future__ import annotations

from meshwright.compiled import compiled
from meshwright.serving.policies.decisions import choose, decide, decide_to_drop
from meshwright.serving.policies.ordering import count_level, is_same, least_important, level_of, prefer
from meshwright.serving.policies.pool import (
    BEGAN,
    BUSY,
    CANCELLED,
    CHOSEN,
    DEADLINE,
    DELAY,
    DEVICE,
    DOWN,
    END,
    FREE_AT,
    FULL,
    HEAD,
    IDLE,
    KEEPS_ENDS,
    LATE,
    LATENCY,
    MASK,
    MODEL,
    MOST,
    NEVER,
    NEXT,
    NOMINAL,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_DEVICES,
    NUM_IDLE,
    NUM_QUEUED,
    NUM_UP,
    PREEMPT,
    REQUEST,
    RESIZE,
    REST,
    ROW,
    RUN,
    SLACK,
    SLOWNESS,
    START,
    TAIL,
    UNIT,
    WORK,
    Ints,
)


@compiled
def cells_of_heap(size: int) -> int:
    """Return the number of cells of a heap for ``size`` items (`lay_heap`)."""
    return 3 + 3 * size + 1


# Items are numbered; each can be moved and taken out. A heap is three columns of one int64 array. Cell ``heap`` gives
# the start of the items' keys, ``heap + 1`` that of their order (the number of items, then the items), and ``heap + 2``
# that of each item's place in that order (-1: not in it). Equal keys are ordered by number, so that the order does not
# depend on the history.
@compiled
def lay_heap(array: Ints, at: int, size: int) -> None:
    """Lay out an empty heap from cell ``at`` on, for items from 0 to ``size`` - 1; ``at`` identifies the heap."""
    array[at], array[at + 1], array[at + 2] = at + 3, at + 3 + size, at + 3 + 2 * size + 1
    array[array[at + 1]] = 0
    array[array[at + 2] : array[at + 2] + size] = -1


@compiled
def size_of(array: Ints, heap: int) -> int:
    """Return the number of items in the heap."""
    return int(array[array[heap + 1]])


@compiled
def first_of(array: Ints, heap: int) -> int:
    """Return the item with the least key; the heap must not be empty."""
    return int(array[array[heap + 1] + 1])


@compiled
def least_of(array: Ints, heap: int, otherwise: int) -> int:
    """Return the least key, or ``otherwise`` if the heap is empty."""
    order = array[heap + 1]
    return array[array[heap] + array[order + 1]] if array[order] > 0 else otherwise


@compiled
def is_in(array: Ints, heap: int, number: int) -> bool:
    """Return whether an item is in the heap."""
    return bool(array[array[heap + 2] + number] >= 0)


@compiled
def put(array: Ints, heap: int, number: int, value: int) -> None:
    """Add the item ``number`` with the key ``value``, or change its key."""
    key, order, place = array[heap], array[heap + 1], array[heap + 2]
    at = array[place + number]
    if at < 0:
        at = array[order] + 1
        array[order] = at
        array[key + number] = value
        _rise(array, key, order, place, number, at)
    elif value < array[key + number]:
        array[key + number] = value
        _rise(array, key, order, place, number, at)
    elif value > array[key + number]:
        array[key + number] = value
        _sink(array, key, order, place, number, at)


@compiled
def take_out(array: Ints, heap: int, number: int) -> None:
    """Remove an item; do nothing if it is not in the heap."""
    key, order, place = array[heap], array[heap + 1], array[heap + 2]
    at = array[place + number]
    if at < 0:
        return
    array[place + number] = -1
    size = array[order]
    array[order] = size - 1
    if at == size:
        return
    last = array[order + size]
    if _before(array, key, last, number):
        _rise(array, key, order, place, last, at)
    else:
        _sink(array, key, order, place, last, at)


@compiled
def _before(array: Ints, key: int, one: int, other: int) -> bool:
    first, second = array[key + one], array[key + other]
    return bool(first < second or (first == second and one < other))


@compiled
def _rise(array: Ints, key: int, order: int, place: int, number: int, at: int) -> None:
    while at > 1:
        parent = array[order + (at >> 1)]
        if _before(array, key, parent, number):
            break
        array[order + at] = parent
        array[place + parent] = at
        at >>= 1
    array[order + at] = number
    array[place + number] = at


@compiled
def _sink(array: Ints, key: int, order: int, place: int, number: int, at: int) -> None:
    size = array[order]
    while 2 * at <= size:
        child = 2 * at
        if child < size and _before(array, key, array[order + child + 1], array[order + child]):
            child += 1
        least = array[order + child]
        if _before(array, key, number, least):
            break
        array[order + at] = least
        array[place + least] = at
        at = child
    array[order + at] = number
    array[place + number] = at


# Devices whose slowness differs by less than this are used by number.
_ALIKE = 250
# A device is faster than another if its slowness is lower by more than this fraction.
_CLEARLY = 16


@compiled
def latency_of(pool: Ints, queue: int, batch: int) -> int:
    """Return the time (ns) of a batch of a queue's model; `NEVER` for a batch that is too large."""
    if batch >= pool[ROW]:
        return NEVER
    return pool[pool[LATENCY] + pool[pool[MODEL] + queue] * pool[ROW] + batch]


@compiled
def length_of(pool: Ints, queue: int) -> int:
    """Return the number of requests that wait in a queue."""
    return pool[pool[TAIL] + queue] - pool[pool[HEAD] + queue]


@compiled
def deadline_at(pool: Ints, queue: int, place: int) -> int:
    """Return when (ns) a request must be done: its deadline less the slack; ``place`` is from HEAD to TAIL."""
    at = pool[pool[START] + queue] + (place & pool[pool[MASK] + queue])
    return pool[pool[DEADLINE] + at] - pool[SLACK]


@compiled
def first_due(pool: Ints, queue: int) -> int:
    """Return when (ns) the first request of a queue must be done; `NEVER` if the queue is empty."""
    return deadline_at(pool, queue, pool[pool[HEAD] + queue]) if length_of(pool, queue) > 0 else NEVER


@compiled
def latency_on(pool: Ints, queue: int, batch: int, device: int) -> int:
    """Return the expected time (ns) of a batch on a device, whose slowness is known from earlier batches."""
    return latency_of(pool, queue, batch) * pool[pool[SLOWNESS] + device] // NOMINAL


@compiled
def begin_on(pool: Ints, device: int, now: int) -> int:
    """Return when (ns) a batch that is decided now starts on a device."""
    if pool[pool[DEVICE] + device] == IDLE:
        return now + pool[DELAY]
    return max(now + pool[DELAY], pool[pool[FREE_AT] + device])


@compiled
def idle_device(pool: Ints) -> int:
    """Return the idle device to use next: the lowest-numbered of the fastest; -1 if no device is idle."""
    return first_of(pool, REST) if size_of(pool, REST) > 0 else -1


@compiled
def forget_down(pool: Ints, heap: int) -> None:
    """Remove failed devices from the top of a policy's own heap: policies are not notified of failures."""
    while size_of(pool, heap) > 0 and pool[pool[DEVICE] + first_of(pool, heap)] == DOWN:
        take_out(pool, heap, first_of(pool, heap))


@compiled
def first_end(pool: Ints, now: int) -> int:
    """Return when (ns) a device is expected to be free: ``now`` if one is idle. The pool must keep ``END``."""
    return now if size_of(pool, REST) > 0 else max(least_of(pool, END, now), now)


@compiled
def value_work(pool: Ints, queue: int, unit: int) -> None:
    """Set the device time of a request of this queue to ``unit`` (ns), and update the ``WORK`` of the pool."""
    pool[WORK] += (unit - pool[pool[UNIT] + queue]) * length_of(pool, queue)
    pool[pool[UNIT] + queue] = unit


@compiled
def least_slowness(pool: Ints, queue: int, begin: int, due: int) -> int:
    """Return the slowness to assume for the first request of a queue, which is due at ``due``.

    If a device is faster than the idle ones, the request may wait for it, and `NOMINAL` is returned. If no device is
    faster, the request must not wait, as devices would be idle and later requests late as well; then the slowness of
    the idle device is returned.
    """
    device = idle_device(pool)
    if device < 0 or not begin + latency_of(pool, queue, 1) <= due < begin + latency_on(pool, queue, 1, device):
        return NOMINAL
    slowness = pool[pool[SLOWNESS] + device]
    for other in range(pool[NUM_DEVICES]):
        if pool[pool[DEVICE] + other] != DOWN and pool[pool[SLOWNESS] + other] < slowness - slowness // _CLEARLY:
            return NOMINAL
    return slowness


@compiled
def drop_late(pool: Ints, now: int, queue: int, begin: int, slowness: int = NOMINAL) -> int:
    """Drop the first requests that would be late even alone if they started at ``begin``; return their number."""
    latest = begin + latency_of(pool, queue, 1) * slowness // NOMINAL
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    at = head
    while at < tail and deadline_at(pool, queue, at) < latest:
        at += 1
    drop(pool, now, queue, at - head, LATE)
    return at - head


@compiled
def largest_batch(pool: Ints, queue: int, begin: int, slowness: int = NOMINAL) -> int:
    """Return the largest number of requests at the head of a queue that are in time as one batch; at least 1.

    ``begin``: when the batch starts (ns). ``slowness``: time of the device's batches relative to the deployment's
    latencies, in thousandths (`NOMINAL` = 1000: as given).
    """
    room = (deadline_at(pool, queue, pool[pool[HEAD] + queue]) - begin) * NOMINAL // slowness
    low, high = 1, min(length_of(pool, queue), pool[pool[MOST] + pool[pool[MODEL] + queue]])
    while low < high:
        middle = (low + high + 1) >> 1
        if latency_of(pool, queue, middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def skip_for(pool: Ints, queue: int, begin: int, target: int, slowness: int = NOMINAL) -> int:
    """Return how many first requests to drop so that a batch of ``target`` requests, or of all others, is in time."""
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    at = head
    while at < tail - 1:
        needed = latency_of(pool, queue, min(target, tail - at)) * slowness // NOMINAL
        if needed <= deadline_at(pool, queue, at) - begin:
            break
        at += 1
    return at - head


@compiled
def enter(pool: Ints, now: int, queue: int, request: int, deadline: int) -> bool:
    """Enqueue a request by deadline; return False if it was dropped, as the queue is full.

    A full queue drops a less important waiting request instead, if it has one.
    """
    mask, start = pool[pool[MASK] + queue], pool[pool[START] + queue]
    if length_of(pool, queue) > mask and not displace(pool, now, queue, request, FULL):
        return False
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    deadlines, requests = pool[DEADLINE] + start, pool[REQUEST] + start
    place = tail & mask
    while tail > head:
        before = (tail - 1) & mask
        if pool[deadlines + before] <= deadline:
            break
        pool[deadlines + place] = pool[deadlines + before]
        pool[requests + place] = pool[requests + before]
        place = before
        tail -= 1
    pool[deadlines + place] = deadline
    pool[requests + place] = request
    pool[pool[TAIL] + queue] += 1
    count_level(pool, queue, request, 1)
    pool[NUM_QUEUED] += 1
    pool[WORK] += pool[pool[UNIT] + queue]
    return True


@compiled
def displace(pool: Ints, now: int, queue: int, request: int, reason: int) -> bool:
    """Drop a less important waiting request, or else the given one; return whether a waiting one was dropped."""
    place = least_important(pool, queue, level_of(request))
    if place >= 0:
        _take_out_of(pool, now, queue, place, reason)
    else:
        refuse(pool, now, queue, request, reason)
    return place >= 0


@compiled
def refuse(pool: Ints, now: int, queue: int, request: int, reason: int) -> None:
    """Drop a request that has not been put into its queue."""
    chosen = choose(pool, 1)
    pool[pool[CHOSEN] + chosen] = request
    decide_to_drop(pool, now, queue, chosen, 1, reason)


@compiled
def drop(pool: Ints, now: int, queue: int, count: int, reason: int) -> None:
    """Drop the first ``count`` requests of a queue."""
    if count > 0:
        decide_to_drop(pool, now, queue, _leave(pool, queue, count), count, reason)


@compiled
def cancel(pool: Ints, now: int, queue: int, request: int, deadline: int) -> bool:
    """Drop one request, wherever it is in a queue; return False if it is not in the queue (any more)."""
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    mask, start = pool[pool[MASK] + queue], pool[pool[START] + queue]
    deadlines, requests = pool[DEADLINE] + start, pool[REQUEST] + start
    low, high = head, tail
    while low < high:
        middle = (low + high) >> 1
        if pool[deadlines + (middle & mask)] < deadline:
            low = middle + 1
        else:
            high = middle
    while low < tail and pool[deadlines + (low & mask)] == deadline:
        if is_same(pool[requests + (low & mask)], request):
            _take_out_of(pool, now, queue, low, CANCELLED)
            return True
        low += 1
    return False


@compiled
def _take_out_of(pool: Ints, now: int, queue: int, place: int, reason: int) -> None:
    """Drop one request of a queue."""
    mask, start = pool[pool[MASK] + queue], pool[pool[START] + queue]
    deadlines, requests = pool[DEADLINE] + start, pool[REQUEST] + start
    request = pool[requests + (place & mask)]
    for before in range(place, pool[pool[TAIL] + queue] - 1):
        pool[deadlines + (before & mask)] = pool[deadlines + ((before + 1) & mask)]
        pool[requests + (before & mask)] = pool[requests + ((before + 1) & mask)]
    pool[pool[TAIL] + queue] -= 1
    count_level(pool, queue, request, -1)
    pool[NUM_QUEUED] -= 1
    pool[WORK] -= pool[pool[UNIT] + queue]
    refuse(pool, now, queue, request, reason)


@compiled
def run(pool: Ints, now: int, queue: int, count: int, device: int) -> None:
    """Run a batch of a queue on a device as soon as the device is free; it must not have a next batch already.

    The caller has found that the first ``count`` requests of the queue are in time. More important requests that can
    run in their place are taken instead (`ordering.prefer`).
    """
    prefer(pool, queue, count)
    begin = begin_on(pool, device, now)
    if pool[pool[DEVICE] + device] == IDLE:
        take_out(pool, REST, device)
        pool[NUM_IDLE] -= 1
        pool[pool[DEVICE] + device] = BUSY
        pool[pool[BEGAN] + device] = begin
    else:
        pool[pool[NEXT] + device] = 1
    pool[pool[FREE_AT] + device] = begin + latency_on(pool, queue, count, device)
    if pool[KEEPS_ENDS]:
        put(pool, END, device, pool[pool[FREE_AT] + device])
    decide(pool, RUN, device, queue, _leave(pool, queue, count), count, begin)


@compiled
def preempt(pool: Ints, now: int, device: int) -> None:
    """Abort the batch that runs on a device; its requests are resubmitted."""
    pool[pool[FREE_AT] + device] = now
    pool[pool[NEXT] + device] = 0
    rest(pool, device)
    decide(pool, PREEMPT, device, 0, pool[NUM_CHOSEN], 0, now)


@compiled
def resize(pool: Ints, now: int, wanted: int) -> None:
    """Decide that ``wanted`` devices are wanted; the driver starts or releases devices."""
    decide(pool, RESIZE, wanted, 0, pool[NUM_CHOSEN], 0, now)


@compiled
def begin_waiting(pool: Ints, queue: int, count: int, device: int, begin: int) -> None:
    """Start the next batch of a device, and recompute its expected end."""
    pool[pool[NEXT] + device] = 0
    pool[pool[BEGAN] + device] = begin
    pool[pool[FREE_AT] + device] = begin + latency_on(pool, queue, count, device)
    if pool[KEEPS_ENDS]:
        put(pool, END, device, pool[pool[FREE_AT] + device])


@compiled
def end_batch(pool: Ints, now: int, device: int, taken: int) -> None:
    """Correct the start of a batch that took ``taken`` ns: a late notice of its end does not count as slowness."""
    later = now - taken - pool[pool[BEGAN] + device]
    pool[pool[BEGAN] + device] += later
    pool[pool[FREE_AT] + device] += later


@compiled
def clear(pool: Ints) -> None:
    """Forget decisions that the driver has carried out."""
    pool[NUM_DECISIONS] = 0
    pool[NUM_CHOSEN] = 0


@compiled
def rest(pool: Ints, device: int) -> None:
    """Mark a device that is up as idle."""
    if pool[pool[DEVICE] + device] != IDLE:
        pool[pool[DEVICE] + device] = IDLE
        pool[NUM_IDLE] += 1
        if pool[KEEPS_ENDS]:
            take_out(pool, END, device)
        put(pool, REST, device, (pool[pool[SLOWNESS] + device] // _ALIKE << 32) + device)


@compiled
def come_up(pool: Ints, device: int, now: int) -> None:
    """Mark a device as up; the driver then calls the policy's ``free``."""
    if pool[pool[DEVICE] + device] == DOWN:
        pool[NUM_UP] += 1
        pool[pool[DEVICE] + device] = BUSY
        pool[pool[FREE_AT] + device] = now
        pool[pool[BEGAN] + device] = now


@compiled
def go_down(pool: Ints, device: int) -> None:
    """Mark a device as down."""
    take_out(pool, END, device)
    pool[pool[NEXT] + device] = 0
    if pool[pool[DEVICE] + device] == IDLE:
        take_out(pool, REST, device)
        pool[NUM_IDLE] -= 1
    if pool[pool[DEVICE] + device] != DOWN:
        pool[NUM_UP] -= 1
        pool[pool[DEVICE] + device] = DOWN


@compiled
def _leave(pool: Ints, queue: int, count: int) -> int:
    """Move the first requests of a queue to the chosen ones; return their first place there."""
    first = choose(pool, count)
    head, mask = pool[pool[HEAD] + queue], pool[pool[MASK] + queue]
    requests, chosen = pool[REQUEST] + pool[pool[START] + queue], pool[CHOSEN] + first
    for offset in range(count):
        request = pool[requests + ((head + offset) & mask)]
        pool[chosen + offset] = request
        count_level(pool, queue, request, -1)
    pool[pool[HEAD] + queue] = head + count
    pool[NUM_QUEUED] -= count
    pool[WORK] -= count * pool[pool[UNIT] + queue]
    return first
