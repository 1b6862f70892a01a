"""What policies do to a pool: let requests in, drop them, run them. Every function writes what the driver has to do."""

from __future__ import annotations

from meshwright.compiled import compiled
from meshwright.serving.policies.decisions import choose, decide, decide_to_drop
from meshwright.serving.policies.heaps import first_of, least_of, put, size_of, take_out
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

# Devices whose slowness differs by less than this are used by number.
_ALIKE = 250
# One is faster than another if it is so by such a part.
_CLEARLY = 16


@compiled
def latency_of(pool: Ints, queue: int, batch: int) -> int:
    """Nanoseconds of a batch of a queue's model; `NEVER` for one that is too large."""
    if batch >= pool[ROW]:
        return NEVER
    return pool[pool[LATENCY] + pool[pool[MODEL] + queue] * pool[ROW] + batch]


@compiled
def length_of(pool: Ints, queue: int) -> int:
    """Requests that wait in a queue."""
    return pool[pool[TAIL] + queue] - pool[pool[HEAD] + queue]


@compiled
def deadline_at(pool: Ints, queue: int, place: int) -> int:
    """When the request at a place, from head to tail, has to be done: its deadline less the slack."""
    at = pool[pool[START] + queue] + (place & pool[pool[MASK] + queue])
    return pool[pool[DEADLINE] + at] - pool[SLACK]


@compiled
def first_due(pool: Ints, queue: int) -> int:
    """When the first request of a queue has to be done; `NEVER` if there is none."""
    return deadline_at(pool, queue, pool[pool[HEAD] + queue]) if length_of(pool, queue) > 0 else NEVER


@compiled
def latency_on(pool: Ints, queue: int, batch: int, device: int) -> int:
    """Nanoseconds that a batch is expected to take on a device, by what others took there."""
    return latency_of(pool, queue, batch) * pool[pool[SLOWNESS] + device] // NOMINAL


@compiled
def begin_on(pool: Ints, device: int, now: int) -> int:
    """When a batch begins that is decided now."""
    if pool[pool[DEVICE] + device] == IDLE:
        return now + pool[DELAY]
    return max(now + pool[DELAY], pool[pool[FREE_AT] + device])


@compiled
def idle_device(pool: Ints) -> int:
    """Of the fast ones among idle devices that with the lowest number, so that others rest; -1 if there is none."""
    return first_of(pool, REST) if size_of(pool, REST) > 0 else -1


@compiled
def forget_down(pool: Ints, heap: int) -> None:
    """Take devices that have failed from the top of a policy's own heap of devices, since no policy is told of them."""
    while size_of(pool, heap) > 0 and pool[pool[DEVICE] + first_of(pool, heap)] == DOWN:
        take_out(pool, heap, first_of(pool, heap))


@compiled
def first_end(pool: Ints, now: int) -> int:
    """When the first device is free, by prediction: now if one is idle. The pool must keep ends."""
    return now if size_of(pool, REST) > 0 else max(least_of(pool, END, now), now)


@compiled
def value_work(pool: Ints, queue: int, unit: int) -> None:
    """From now on a request of this queue is taken to need so many ns of a device."""
    pool[WORK] += (unit - pool[pool[UNIT] + queue]) * length_of(pool, queue)
    pool[pool[UNIT] + queue] = unit


@compiled
def least_slowness(pool: Ints, queue: int, begin: int, due: int) -> int:
    """How slow the fastest device is at least that a queue's first request, which has to be done then, can hope for.

    It may wait for one that is faster than those that are idle. If there is none, it must not be waited for: devices
    would be idle, and what is behind it late as well.
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
    """Drop the first requests that would be late even alone, if they began then; how many these were."""
    latest = begin + latency_of(pool, queue, 1) * slowness // NOMINAL
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    at = head
    while at < tail and deadline_at(pool, queue, at) < latest:
        at += 1
    drop(pool, now, queue, at - head, LATE)
    return at - head


@compiled
def largest_batch(pool: Ints, queue: int, begin: int, slowness: int = NOMINAL) -> int:
    """The most first requests that are in time if they begin then; at least one."""
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
    """How many first requests to drop so that a batch of the target, or all that is left, is in time."""
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
    """Put a request into a queue, by deadline; False if it was dropped, as it is full of no less important ones."""
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
    """There is no room for a request: drop a less important one that waits, or else this one; is there room now?"""
    place = least_important(pool, queue, level_of(request))
    if place >= 0:
        _take_out_of(pool, now, queue, place, reason)
    else:
        refuse(pool, now, queue, request, reason)
    return place >= 0


@compiled
def refuse(pool: Ints, now: int, queue: int, request: int, reason: int) -> None:
    """Drop a request that is in no queue."""
    chosen = choose(pool, 1)
    pool[pool[CHOSEN] + chosen] = request
    decide_to_drop(pool, now, queue, chosen, 1, reason)


@compiled
def drop(pool: Ints, now: int, queue: int, count: int, reason: int) -> None:
    """Drop the first requests of a queue."""
    if count > 0:
        decide_to_drop(pool, now, queue, _leave(pool, queue, count), count, reason)


@compiled
def cancel(pool: Ints, now: int, queue: int, request: int, deadline: int) -> bool:
    """Drop one request, wherever in its queue it stands; False if it is not there (any more)."""
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
    """Run a batch of a queue on a device, as soon as it is free; it must not have its next batch already.

    The batch was made for the first requests; more important ones that can run in their place do (`ordering`).
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
    """Give up what runs on a device; its requests come again."""
    pool[pool[FREE_AT] + device] = now
    pool[pool[NEXT] + device] = 0
    rest(pool, device)
    decide(pool, PREEMPT, device, 0, pool[NUM_CHOSEN], 0, now)


@compiled
def resize(pool: Ints, now: int, wanted: int) -> None:
    """So many devices are wanted from now on."""
    decide(pool, RESIZE, wanted, 0, pool[NUM_CHOSEN], 0, now)


@compiled
def begin_waiting(pool: Ints, queue: int, count: int, device: int, begin: int) -> None:
    """The next batch of a device begins now; what follows it is known anew."""
    pool[pool[NEXT] + device] = 0
    pool[pool[BEGAN] + device] = begin
    pool[pool[FREE_AT] + device] = begin + latency_on(pool, queue, count, device)
    if pool[KEEPS_ENDS]:
        put(pool, END, device, pool[pool[FREE_AT] + device])


@compiled
def end_batch(pool: Ints, now: int, device: int, taken: int) -> None:
    """A device has ended its batch, which took so long: when that is known late, the device is not slow for it."""
    later = now - taken - pool[pool[BEGAN] + device]
    pool[pool[BEGAN] + device] += later
    pool[pool[FREE_AT] + device] += later


@compiled
def clear(pool: Ints) -> None:
    """The driver has carried out all decisions."""
    pool[NUM_DECISIONS] = 0
    pool[NUM_CHOSEN] = 0


@compiled
def rest(pool: Ints, device: int) -> None:
    """A device that is up has nothing to do."""
    if pool[pool[DEVICE] + device] != IDLE:
        pool[pool[DEVICE] + device] = IDLE
        pool[NUM_IDLE] += 1
        if pool[KEEPS_ENDS]:
            take_out(pool, END, device)
        put(pool, REST, device, (pool[pool[SLOWNESS] + device] // _ALIKE << 32) + device)


@compiled
def come_up(pool: Ints, device: int, now: int) -> None:
    """A device is there from now on; policies are told that it is free."""
    if pool[pool[DEVICE] + device] == DOWN:
        pool[NUM_UP] += 1
        pool[pool[DEVICE] + device] = BUSY
        pool[pool[FREE_AT] + device] = now
        pool[pool[BEGAN] + device] = now


@compiled
def go_down(pool: Ints, device: int) -> None:
    """A device is gone."""
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
    """Move the first requests of a queue to the chosen ones; where they begin there."""
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
