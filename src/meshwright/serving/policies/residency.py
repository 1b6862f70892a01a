"""Models on devices that cannot hold all of them: load the models in demand, and evict the least recently used ones.

A device copies the weights of one model at a time, while it computes, in a known time. Therefore drivers do not notify
policies of the end of a load.

The demand of a model is the device time of its queued requests that can still be in time after a load, and of requests
that were dropped because the model was missing. Demand is divided among the devices that hold the model or are loading
it. The part that these devices cannot do within an SLO, besides the other demand assigned to them, is unserved. The
model with most unserved demand is loaded onto the device with least to do. (Clockwork, OSDI 2020, divides demand
unevenly, in favour of devices with less to do.) The least recently used models on that device are evicted. A model is
not evicted while its batch is running or next, nor while requests wait for it and it has not run since it was loaded,
so that each load serves requests.

Devices come up empty. Queues are numbered like models. The state is in a policy's own cells (`lay_residency`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.decisions import decide
from meshwright.serving.policies.pool import (
    BUSY,
    DELAY,
    DEVICE,
    DOWN,
    FREE_AT,
    HEAD,
    LOAD,
    MOST,
    NEVER,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_DEVICES,
    NUM_QUEUES,
    READY,
    SLO,
    TAIL,
    TIMER,
    UNLOAD,
    Ints,
)
from meshwright.serving.policies.queues import (
    begin_on,
    cells_of_heap,
    deadline_at,
    drop_late,
    is_in,
    latency_of,
    lay_heap,
    length_of,
    put,
    size_of,
    take_out,
)

# Memory is counted in fractions of a device's memory.
PARTS = 10**12
# Cells: whether models are loaded at all, and the starts of columns. Of models: memory, load time, and demand dropped
# because the model was missing (ns of a device). Of devices: used memory; the queue whose batch runs, and the next one,
# or -1; the model that was loaded last. Of both: when a model is on a device, and when it was last used.
_IS_ON, _MEMORY, _LOAD, _MISSED, _HELD, _RUNS, _FOLLOWS, _LOADED, _THERE, _LAST = range(10)
# The heap of loading devices by the end of the load.
COPYING = 10
# An event may bring several loads, when a device fails; this always leaves room for the evictions of the next one.
_MOST_DECISIONS = 512


class Weights(NamedTuple):
    """For each model: its memory, in units of 1 / `PARTS` of a device's memory, and its load time (ns).

    Both arrays are empty if devices hold all models.
    """

    memory: Ints
    load: Ints


def cells_of_residency(num_devices: int, num_models: int) -> int:
    """Return the number of cells that `lay_residency` needs."""
    return COPYING + cells_of_heap(num_devices) + 3 * num_models + 4 * num_devices + 2 * num_devices * num_models


def lay_residency(pool: Ints, at: int, weights: Weights, num_devices: int) -> None:
    """Initialise the cells from ``at`` on, for devices that do not hold models yet."""
    num_models = len(weights.load)
    pool[at + _IS_ON] = 1
    lay_heap(pool, at + COPYING, num_devices)
    sizes = [num_models] * 3 + [num_devices] * 4 + [num_devices * num_models] * 2
    begins = at + COPYING + cells_of_heap(num_devices) + np.cumsum([0, *sizes])
    pool[at + _MEMORY : at + COPYING] = begins[:-1]
    for column, fill in (
        (_MEMORY, weights.memory),
        (_LOAD, weights.load),
        (_RUNS, -1),
        (_FOLLOWS, -1),
        (_THERE, NEVER),
    ):
        pool[begins[column - 1] : begins[column]] = fill


@compiled
def is_there(pool: Ints, at: int, queue: int, device: int, now: int) -> bool:
    """Return whether a device holds a queue's model, and has completely loaded it by ``now``."""
    return bool(_there_at(pool, at, queue, device) <= now)


@compiled
def note_run(pool: Ints, at: int, queue: int, device: int, now: int, is_next: bool) -> None:
    """Record that a device computes a batch of a queue, at once or, with ``is_next``, after its current batch."""
    pool[pool[at + (_FOLLOWS if is_next else _RUNS)] + device] = queue
    pool[pool[at + _LAST] + device * pool[NUM_QUEUES] + queue] = now


@compiled
def note_end(pool: Ints, at: int, device: int) -> None:
    """Record that a device has ended its batch, and starts its next batch if it has one."""
    pool[pool[at + _RUNS] + device] = pool[pool[at + _FOLLOWS] + device]
    pool[pool[at + _FOLLOWS] + device] = -1


@compiled
def note_come_up(pool: Ints, at: int, device: int, now: int) -> None:
    """Record that a device has come up, and does not hold models."""
    note_end(pool, at, device)
    note_end(pool, at, device)
    take_out(pool, at + COPYING, device)
    for queue in range(pool[NUM_QUEUES]):
        if _there_at(pool, at, queue, device) < NEVER:
            _evict(pool, at, queue, device, now)


@compiled
def end_load(pool: Ints, at: int, device: int) -> int:
    """Record that a device has loaded a model; return the queue of this model."""
    take_out(pool, at + COPYING, device)
    return int(pool[pool[at + _LOADED] + device])


@compiled
def watch(pool: Ints, at: int, queue: int) -> None:
    """Set ``TIMER`` to the moment at which a queue's first request is late even if a device starts it at once."""
    if length_of(pool, queue) == 0:
        take_out(pool, TIMER, queue)
        return
    needed = pool[DELAY] + latency_of(pool, queue, 1)
    if not _is_held(pool, at, queue):
        needed += pool[pool[at + _LOAD] + queue]
    put(pool, TIMER, queue, deadline_at(pool, queue, pool[pool[HEAD] + queue]) - needed + 1)


@compiled
def drop_hopeless(pool: Ints, at: int, queue: int, now: int) -> None:
    """Drop the first requests of a queue that are late on any device, even if the model is loaded now."""
    begin = now + pool[DELAY] + pool[pool[at + _LOAD] + queue]
    for device in range(pool[NUM_DEVICES]):
        there_at = _there_at(pool, at, queue, device)
        if there_at < NEVER and pool[pool[DEVICE] + device] != DOWN:
            begin = min(begin, max(begin_on(pool, device, now), there_at))
    dropped = drop_late(pool, now, queue, begin)
    if not _is_held(pool, at, queue):
        pool[pool[at + _MISSED] + queue] += dropped * latency_of(pool, queue, 1)


@compiled
def load_most_wanted(pool: Ints, at: int, now: int, asked: int) -> None:
    """Load the model with most unserved demand among all waiting queues and the queue ``asked`` (-1: no further queue).

    No model is loaded if all demand is served, or if no device can load a model now.
    """
    num_devices = pool[NUM_DEVICES]
    dealt = np.zeros(num_devices, np.int64)
    num_ready = 0
    for device in range(num_devices):
        state = pool[pool[DEVICE] + device]
        num_ready += state != DOWN and not is_in(pool, at + COPYING, device)
        if state == BUSY:
            dealt[device] = max(pool[pool[FREE_AT] + device] - now, 0)
    if num_ready == 0 or pool[NUM_DECISIONS] > _MOST_DECISIONS:
        return
    order, waiting = pool[READY + 1], size_of(pool, READY)
    for place in range(1, waiting + 1):
        _deal_out(pool, at, pool[order + place], now, dealt)
    most, queue, target = 0, -1, -1
    for place in range(1, waiting + 2):
        each = pool[order + place] if place <= waiting else asked
        unserved = _unserved(pool, at, each, now, dealt) if each >= 0 else 0
        if unserved > most or (unserved == most and queue > each >= 0):
            device = _device_for(pool, at, each, dealt)
            if device >= 0:
                most, queue, target = unserved, each, device
    if queue >= 0:
        _load(pool, at, queue, target, now)


@compiled
def _there_at(pool: Ints, at: int, queue: int, device: int) -> int:
    return int(pool[pool[at + _THERE] + device * pool[NUM_QUEUES] + queue])


@compiled
def _is_held(pool: Ints, at: int, queue: int) -> bool:
    """Return whether a device holds a queue's model or is loading it."""
    for device in range(pool[NUM_DEVICES]):
        if _there_at(pool, at, queue, device) < NEVER and pool[pool[DEVICE] + device] != DOWN:
            return True
    return False


@compiled
def _demand(pool: Ints, at: int, queue: int, now: int) -> int:
    """Return the device time (ns) of a queue's requests, or 0 if even the last one is late after a load."""
    length = length_of(pool, queue)
    needed = pool[DELAY] + pool[pool[at + _LOAD] + queue] + latency_of(pool, queue, 1)
    if length == 0 or deadline_at(pool, queue, pool[pool[TAIL] + queue] - 1) - now < needed:
        return 0
    batch = min(length, pool[pool[MOST] + queue])
    return latency_of(pool, queue, batch) * length // batch


@compiled
def _num_holders(pool: Ints, at: int, queue: int) -> int:
    count = 0
    for device in range(pool[NUM_DEVICES]):
        count += _there_at(pool, at, queue, device) < NEVER and pool[pool[DEVICE] + device] != DOWN
    return count


@compiled
def _deal_out(pool: Ints, at: int, queue: int, now: int, dealt: Ints) -> None:
    """Add the demand of a queue to the work of the devices that hold its model."""
    share = _demand(pool, at, queue, now) // max(_num_holders(pool, at, queue), 1)
    for device in range(pool[NUM_DEVICES]):
        if _there_at(pool, at, queue, device) < NEVER and pool[pool[DEVICE] + device] != DOWN:
            dealt[device] += share


@compiled
def _unserved(pool: Ints, at: int, queue: int, now: int, dealt: Ints) -> int:
    """Return demand less what devices can do of it within an SLO if each serves the same share of all its work."""
    demand, slo = _demand(pool, at, queue, now), pool[pool[SLO] + queue]
    share = demand // max(_num_holders(pool, at, queue), 1)
    unserved = float(demand + pool[pool[at + _MISSED] + queue])
    for device in range(pool[NUM_DEVICES]):
        if _there_at(pool, at, queue, device) < NEVER and pool[pool[DEVICE] + device] != DOWN:
            unserved -= share * min(1.0, slo / max(dealt[device], 1))
    return int(unserved)


@compiled
def _device_for(pool: Ints, at: int, queue: int, dealt: Ints) -> int:
    """Return the device with least to do, then most room, that can load a queue's model; -1 if none can."""
    found, memory = -1, pool[pool[at + _MEMORY] + queue]
    for device in range(pool[NUM_DEVICES]):
        if pool[pool[DEVICE] + device] == DOWN or is_in(pool, at + COPYING, device):
            continue
        if _there_at(pool, at, queue, device) < NEVER:
            continue
        held = pool[pool[at + _HELD] + device]
        if found >= 0 and (dealt[device], held) >= (dealt[found], pool[pool[at + _HELD] + found]):
            continue
        if held + memory <= PARTS or _kept(pool, at, device) + memory <= PARTS:
            found = device
    return found


@compiled
def _kept(pool: Ints, at: int, device: int) -> int:
    """Return the memory of the models that must stay on a device now."""
    kept = 0
    for queue in range(pool[NUM_QUEUES]):
        if _there_at(pool, at, queue, device) < NEVER and _stays(pool, at, queue, device):
            kept += pool[pool[at + _MEMORY] + queue]
    return kept


@compiled
def _stays(pool: Ints, at: int, queue: int, device: int) -> bool:
    """Return whether a device computes a model, or has not yet computed it since the load though requests wait."""
    if queue in (pool[pool[at + _RUNS] + device], pool[pool[at + _FOLLOWS] + device]):
        return True
    cell = device * pool[NUM_QUEUES] + queue
    has_run = pool[pool[at + _LAST] + cell] >= pool[pool[at + _THERE] + cell]
    return not has_run and length_of(pool, queue) > 0


@compiled
def _load(pool: Ints, at: int, queue: int, device: int, now: int) -> None:
    memory = pool[pool[at + _MEMORY] + queue]
    while pool[pool[at + _HELD] + device] + memory > PARTS:
        _evict(pool, at, _least_recent(pool, at, device), device, now)
    cell = device * pool[NUM_QUEUES] + queue
    there_at = now + pool[DELAY] + pool[pool[at + _LOAD] + queue]
    # Marks the model as not used since its load.
    pool[pool[at + _THERE] + cell], pool[pool[at + _LAST] + cell] = there_at, there_at - 1
    pool[pool[at + _HELD] + device] += memory
    pool[pool[at + _LOADED] + device] = queue
    pool[pool[at + _MISSED] + queue] = 0
    put(pool, at + COPYING, device, there_at)
    decide(pool, LOAD, device, queue, pool[NUM_CHOSEN], 0, now + pool[DELAY])
    watch(pool, at, queue)


@compiled
def _least_recent(pool: Ints, at: int, device: int) -> int:
    found, last = -1, pool[at + _LAST] + device * pool[NUM_QUEUES]
    for queue in range(pool[NUM_QUEUES]):
        is_older = found < 0 or pool[last + queue] < pool[last + found]
        if is_older and _there_at(pool, at, queue, device) < NEVER and not _stays(pool, at, queue, device):
            found = queue
    return found


@compiled
def _evict(pool: Ints, at: int, queue: int, device: int, now: int) -> None:
    pool[pool[at + _THERE] + device * pool[NUM_QUEUES] + queue] = NEVER
    pool[pool[at + _HELD] + device] -= pool[pool[at + _MEMORY] + queue]
    decide(pool, UNLOAD, device, queue, pool[NUM_CHOSEN], 0, now)
    watch(pool, at, queue)
