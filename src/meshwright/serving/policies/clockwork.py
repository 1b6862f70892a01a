"""Clockwork (OSDI 2020): one controller plans every device slightly ahead, and only batches that will be in time.

A device is given its next batch up to ``ahead`` microseconds before it is free. Batches have the sizes for which models
were compiled, the powers of two. The next queue is the one whose first deadline, less the latency of its largest
batch, comes first. From this queue, the largest batch of requests that are all in time is taken; earlier requests that
would be late in it are skipped (a smaller batch may serve these). When a queue is next, its requests that would be late
even alone are dropped.

Two constants of the published controller are settings of the pool here: the time between a decision and its start (1 ms
there), and how long before deadlines batches are planned to end (5 ms there). If devices do not hold all models, models
are loaded and evicted (`residency`), and batches are given to devices that hold their model.

Differences from the published system:

- Latencies are fixed here, as the next batch is planned before the current one has ended. There they are the 99th
  percentile of the last ten measurements; here, slow devices make answers late.
- An action there has a window, from an earliest to a latest moment: a device that cannot start it in time drops it
  instead of being late.
- There, each model and batch size is a strategy with its own priority; here each model has one, that of the largest
  waiting batch.
- There, no batch of more than one request takes longer than 25 ms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.compiled import compiled
from meshwright.serving.policies.ordering import bring_forward
from meshwright.serving.policies.pool import (
    BEGAN,
    BUSY,
    DEVICE,
    DOWN,
    FREE_AT,
    HEAD,
    IDLE,
    MODEL,
    MOST,
    NEVER,
    NEXT,
    NUM_DEVICES,
    OWN,
    READY,
    REST,
    TAIL,
    TIMER,
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
    latency_of,
    lay_heap,
    least_of,
    length_of,
    put,
    rest,
    run,
    size_of,
    take_out,
)
from meshwright.serving.policies.residency import (
    COPYING,
    cells_of_residency,
    drop_hopeless,
    end_load,
    is_there,
    lay_residency,
    load_most_wanted,
    note_come_up,
    note_end,
    note_run,
    watch,
)


class Clockwork(NamedTuple):
    """The policy Clockwork. ``ahead``: how long (µs) before a device is free it gets its next batch."""

    ahead: int = 10_000

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return a pool with a heap of devices by when they are nearly done, and `residency` cells for ``weights``."""
        weights, num_devices = facts.get("weights"), facts["num_devices"]
        num_own = cells_of_heap(num_devices)
        num_held = 1 if weights is None else cells_of_residency(num_devices, len(weights.load))
        rest_of = {name: fact for name, fact in facts.items() if name != "weights"}
        pool = allocate_pool(**rest_of, num_own=num_own + num_held)
        lay_heap(pool, int(pool[OWN]), num_devices)
        if weights is not None:
            lay_residency(pool, int(pool[OWN]) + num_own, weights, num_devices)
        return pool

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Enqueue the request; plan for devices that are free, or soon will be."""
        if enter(pool, now, queue, request, deadline):
            _rank(pool, queue)
            if _loads(pool):
                _serve(pool, now, queue, self.ahead * 1000)
                load_most_wanted(pool, _held(pool), now, queue)
            else:
                _plan(pool, now, self.ahead * 1000)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Plan for an idle device; if it has started its next batch, plan for it when it is nearly done."""
        if _loads(pool):
            _free_holder(pool, now, device, self.ahead * 1000)
            return
        if pool[pool[FREE_AT] + device] > now and pool[pool[DEVICE] + device] == BUSY:
            _expect(pool, device, self.ahead * 1000)
        else:
            take_out(pool, pool[OWN], device)
            rest(pool, device)
        _plan(pool, now, self.ahead * 1000)

    def wake(self, pool: Ints, now: int) -> None:
        """Plan for a device that is nearly done or has loaded a model, or drop a request that would be late."""
        if _loads(pool):
            _wake_holders(pool, now, self.ahead * 1000)
        else:
            _plan(pool, now, self.ahead * 1000)

    def next_wake(self, pool: Ints) -> int:
        """Return when (ns) the next device is nearly done, or, with `residency`, a load ends or a request is lost.

        Without waiting requests it returns `NEVER`.
        """
        if size_of(pool, READY) == 0:
            return NEVER
        nearly_done = least_of(pool, pool[OWN], NEVER)
        if not _loads(pool):
            return nearly_done
        return min(nearly_done, least_of(pool, TIMER, NEVER), least_of(pool, _held(pool) + COPYING, NEVER))


@compiled
def _held(pool: Ints) -> int:
    """Return where the cells of `residency` start."""
    return int(pool[OWN] + cells_of_heap(pool[NUM_DEVICES]))


@compiled
def _loads(pool: Ints) -> bool:
    """Return whether devices hold only some models."""
    return bool(pool[_held(pool)] == 1)


@compiled
def _expect(pool: Ints, device: int, ahead: int) -> None:
    put(pool, pool[OWN], device, pool[pool[FREE_AT] + device] - ahead)


@compiled
def _rank(pool: Ints, queue: int) -> None:
    """Rank a queue by its first deadline less the latency of its largest batch."""
    if length_of(pool, queue) == 0:
        take_out(pool, READY, queue)
        take_out(pool, TIMER, queue)
        return
    first = deadline_at(pool, queue, pool[pool[HEAD] + queue])
    put(pool, READY, queue, first - latency_of(pool, queue, _compiled_size(pool, queue)))
    if _loads(pool):
        watch(pool, _held(pool), queue)


@compiled
def _compiled_size(pool: Ints, queue: int) -> int:
    """Return the largest batch size, a power of two, for which enough requests wait."""
    size = 1
    while 2 * size <= min(length_of(pool, queue), pool[pool[MOST] + pool[pool[MODEL] + queue]]):
        size *= 2
    return size


@compiled
def _plan(pool: Ints, now: int, ahead: int) -> None:
    """Give batches to idle or nearly finished devices while there are both."""
    while size_of(pool, READY) > 0:
        forget_down(pool, pool[OWN])
        is_idle = size_of(pool, REST) > 0
        if not is_idle and least_of(pool, pool[OWN], NEVER) > now:
            return
        device = idle_device(pool) if is_idle else first_of(pool, pool[OWN])
        _give(pool, now, first_of(pool, READY), device, ahead)


@compiled
def _give(pool: Ints, now: int, queue: int, device: int, ahead: int) -> None:
    """Give a device the largest batch of a queue that is in time there; drop requests that are late even alone."""
    is_idle = pool[pool[DEVICE] + device] == IDLE
    begin = begin_on(pool, device, now)
    drop_late(pool, now, queue, begin)
    if length_of(pool, queue) > 0:
        batch, skipped = _largest_compiled(pool, queue, begin)
        bring_forward(pool, queue, skipped, batch)
        run(pool, now, queue, batch, device)
        if is_idle:
            _expect(pool, device, ahead)
        else:
            take_out(pool, pool[OWN], device)
        if _loads(pool):
            note_run(pool, _held(pool), queue, device, now, not is_idle)
    _rank(pool, queue)


@compiled
def _free_holder(pool: Ints, now: int, device: int, ahead: int) -> None:
    """Handle a device that has come up, has ended its last batch, or has started its next one."""
    began, held = pool[pool[BEGAN] + device], _held(pool)
    # Only for a device that has come up is the end the start.
    if pool[pool[FREE_AT] + device] == began:
        note_come_up(pool, held, device, now)
    note_end(pool, held, device)
    if began >= now and pool[pool[FREE_AT] + device] > began:
        _expect(pool, device, ahead)
    else:
        take_out(pool, pool[OWN], device)
        rest(pool, device)
    _fill(pool, now, device, ahead)
    load_most_wanted(pool, held, now, -1)


@compiled
def _wake_holders(pool: Ints, now: int, ahead: int) -> None:
    """Handle one event that is due; for others at the same moment, the driver wakes the policy again."""
    held = _held(pool)
    if least_of(pool, held + COPYING, NEVER) <= now:
        queue = end_load(pool, held, first_of(pool, held + COPYING))
        _serve(pool, now, queue, ahead)
        load_most_wanted(pool, held, now, -1)
    elif least_of(pool, pool[OWN], NEVER) <= now:
        device = first_of(pool, pool[OWN])
        take_out(pool, pool[OWN], device)
        _fill(pool, now, device, ahead)
    elif least_of(pool, TIMER, NEVER) <= now:
        queue = first_of(pool, TIMER)
        drop_hopeless(pool, held, queue, now)
        _rank(pool, queue)
        load_most_wanted(pool, held, now, queue)


@compiled
def _takes_more(pool: Ints, now: int, device: int, ahead: int) -> bool:
    """Return whether a device is idle, or nearly done and without a next batch."""
    state = pool[pool[DEVICE] + device]
    if state == DOWN or pool[pool[NEXT] + device] == 1:
        return False
    return bool(state == IDLE or pool[pool[FREE_AT] + device] - ahead <= now)


@compiled
def _serve(pool: Ints, now: int, queue: int, ahead: int) -> None:
    """Give batches of a queue to devices that hold its model, the first free ones first."""
    held = _held(pool)
    while length_of(pool, queue) > 0:
        found, earliest = -1, NEVER
        for device in range(pool[NUM_DEVICES]):
            if _takes_more(pool, now, device, ahead) and is_there(pool, held, queue, device, now):
                begin = begin_on(pool, device, now)
                if begin < earliest:
                    found, earliest = device, begin
        if found < 0:
            return
        _give(pool, now, queue, found, ahead)


@compiled
def _fill(pool: Ints, now: int, device: int, ahead: int) -> None:
    """Give a device batches of queues whose models it holds, the most urgent first."""
    held = _held(pool)
    while _takes_more(pool, now, device, ahead):
        found, order = -1, pool[READY + 1]
        for place in range(1, size_of(pool, READY) + 1):
            queue = pool[order + place]
            if is_there(pool, held, queue, device, now):
                key = pool[pool[READY] + queue]
                if found < 0 or (key, queue) < (pool[pool[READY] + found], found):
                    found = queue
        if found < 0:
            return
        _give(pool, now, found, device, ahead)


@compiled
def _largest_compiled(pool: Ints, queue: int, begin: int) -> tuple[int, int]:
    """Return the largest power-of-two batch that is in time, and how many earlier requests, which are not, to skip."""
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    size = _compiled_size(pool, queue)
    while size > 1:
        end = begin + latency_of(pool, queue, size)
        at = head
        while at + size <= tail and deadline_at(pool, queue, at) < end:
            at += 1
        if at + size <= tail:
            return size, at - head
        size //= 2
    return 1, 0
