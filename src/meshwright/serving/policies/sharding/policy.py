"""A sharded scheduler in one thread, as a policy (`Sharded`): the rank and the shards, with messages delivered at once.

Messages are delivered in a fixed order. The pool that the driver sees is the rank's pool. After the rank's own cells it
has the mailboxes and the pools of the shards, each a normal pool at an offset; the shards' decisions are copied to the
rank's pool. The queues of the rank's pool only count waiting requests. A driver therefore cannot read or cancel single
requests, as a server has to, so that only the simulator supports this policy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.decisions import choose, decide, decide_to_drop
from meshwright.serving.policies.deferred import begin_batch, typically
from meshwright.serving.policies.meter import measure_rate
from meshwright.serving.policies.ordering import expect_no_faster, observe, trust
from meshwright.serving.policies.pool import (
    BEGAN,
    BUSY,
    CHOSEN,
    DECISION,
    DELAY,
    DEVICE,
    DOWN,
    DROP,
    END,
    FREE_AT,
    GUARD,
    HEAD,
    KEEPS_ENDS,
    LATE,
    MODEL,
    MOST,
    NEVER,
    NOMINAL,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_DEVICES,
    NUM_IDLE,
    NUM_QUEUED,
    NUM_QUEUES,
    NUM_UP,
    OWN,
    READY,
    REST,
    SLACK,
    SLOWNESS,
    TAIL,
    TIMER,
    TYPICAL,
    WIDTH,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import (
    clear,
    drop_late,
    enter,
    first_due,
    first_of,
    idle_device,
    is_in,
    latency_of,
    latency_on,
    least_of,
    least_slowness,
    length_of,
    put,
    refuse,
    rest,
    size_of,
    take_out,
)
from meshwright.serving.policies.sharding import CANDIDATE, FREE, GRANT, TAKEN, UNUSED
from meshwright.serving.policies.sharding.mailboxes import WIDTH as ROW_WIDTH
from meshwright.serving.policies.sharding.mailboxes import cells_of_mailbox, receive, room_in, send
from meshwright.spec import ServingError

# Columns of own cells, with a cell for each queue.
_WINDOW_END, _DUE, _IS_GRANTED = range(3)
CELLS_OF_QUEUE = 3


# The rank has the devices, and for each queue of all shards the batch that it could run next. A candidate whose window
# has started is granted an idle device; among several, the one whose window ends first (`deferred`). Until its shard
# has answered, candidates of that queue are outdated and ignored. Queue q of all is queue q // S of shard q % S. In the
# rank's pool the queues hold no requests: ``TIMER`` is the start of windows, ``READY`` the end of those that have
# started. If the pool keeps ends (``END``), a device is taken to be free at the end that its shard announced, as in
# Symphony; otherwise it is free when the driver says so. Own cells: for each queue the end of its window, when its
# first request is due, and whether it has been granted a device.
def allocate_rank(facts: dict[str, Any], num_more: int = 0, *, keep_ends: bool = False) -> Ints:
    """Return the rank's pool for the arguments of `allocate_pool`; it has ``num_more`` own cells in addition."""
    num_own = CELLS_OF_QUEUE * len(np.asarray(facts["latency"])) + num_more
    return allocate_pool(**{**facts, "num_own": num_own, "keep_ends": keep_ends})


@compiled
def take_rank_row(pool: Ints, row: Ints, now: int, boxes: Ints) -> None:
    """Handle a row that the rank has received: a message of a shard, or a free device.

    The row has the queue's number among the queues of all shards. ``boxes`` has a mailbox to each shard.
    """
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
    """Handle a device that is free by now, as its shard has announced, or the start of a queue's window."""
    if least_of(pool, END, NEVER) <= now:
        _use(pool, now, first_of(pool, END), boxes)
    elif least_of(pool, TIMER, NEVER) <= now:
        _offer(pool, now, first_of(pool, TIMER), boxes)


@compiled
def next_of_rank(pool: Ints) -> int:
    """Return when (ns) the rank must be woken."""
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


# `begin_batch` keeps no devices in reserve.
_NONE_SPARE = 101


# A shard has the queues of some models, numbered from 0, in its own pool. As in `deferred`, requests wait for a larger
# batch until their schedulable window starts; but only the rank knows whether a device is idle. So a shard sends it
# each queue's window, as the **candidate** to run next, whenever it has changed, and makes a batch when it is granted a
# device. In its pool, ``TIMER`` is when the first request of a queue can no longer be in time even alone; ``READY`` has
# the queues whose candidate is still to be sent, the most urgent first: only the newest counts, so a full mailbox
# blocks nothing. Own cells: for each queue, the requests dropped as late since the last message to the rank.
def allocate_shard(facts: dict[str, Any], number: int, count: int) -> Ints:
    """Return the pool of shard ``number`` of ``count``, with every ``count``-th model from ``number`` on.

    ``facts`` are the arguments of `allocate_pool` for all models.
    """
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
    """Enqueue a request in its shard, unless it would be late."""
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
    """Start a batch on a device that the rank has granted, or return the device to the rank if all would be late.

    The parameters from ``queue`` to ``hoped`` are those of a GRANT row; ``box`` is the mailbox to the rank.
    """
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
    """Send a shard's changed candidates to the rank, but keep room in ``box`` for the answers to all grants."""
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
    """Return when (ns) a shard must be woken."""
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


class Sharded(NamedTuple):
    """Symphony's policy in ``shards`` and a rank, in one thread; ``window`` is as in `deferred`.

    At most one shard per model is made.
    """

    shards: int = 2
    window: int = 100

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return the rank's pool, which contains the pools of all shards. Raises ServingError if ``shards`` is 0."""
        if self.shards < 1:
            raise ServingError(f"A sharded scheduler needs at least one shard; given shards={self.shards}.")
        num_models = len(facts["latency"])
        count = min(self.shards, num_models)
        shards = [allocate_shard(facts, number, count) for number in range(count)]
        # Room for answers to all grants, and some candidates.
        cells = cells_of_mailbox(facts["num_devices"] + _SOME_CANDIDATES)
        places = [1 + count + 1 + 2 * count * cells]
        for shard in shards:
            places.append(places[-1] + len(shard))
        pool = allocate_rank(facts, places[-1])
        own = pool[pool[OWN] + CELLS_OF_QUEUE * num_models :]
        own[0], own[1 : count + 2] = count, places
        for shard, first, end in zip(shards, places[:-1], places[1:], strict=True):
            own[first:end] = shard
        return pool

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Pass the request to the shard of its model."""
        let_in(pool, now, queue, request, deadline, self.window)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Pass the device to the rank, which grants it."""
        free_device(pool, now, device, self.window)

    def wake(self, pool: Ints, now: int) -> None:
        """Wake the shards and the rank."""
        wake_parts(pool, now, self.window)

    def next_wake(self, pool: Ints) -> int:
        """Return the first moment (ns) at which a shard or the rank must be woken."""
        return next_of_parts(pool)


_SOME_CANDIDATES = 16


@compiled
def let_in(pool: Ints, now: int, queue: int, request: int, deadline: int, window: int) -> None:
    """Pass a request to the shard of its model, and deliver the messages that follow."""
    shards = pool[_parts(pool)]
    pool[pool[TAIL] + queue] += 1
    pool[NUM_QUEUED] += 1
    take_arrival(_shard(pool, queue % shards), now, queue // shards, request, deadline)
    _deliver(pool, now, window)


@compiled
def free_device(pool: Ints, now: int, device: int, window: int) -> None:
    """Notify the rank of a free device, and deliver the messages that follow."""
    row = np.zeros(ROW_WIDTH, np.int64)
    row[0], row[3] = FREE, device
    take_rank_row(pool, row, now, _boxes(pool, 1))
    _deliver(pool, now, window)


@compiled
def wake_parts(pool: Ints, now: int, window: int) -> None:
    """Wake the shards, then the rank, which then has the current candidates of all shards."""
    for number in range(pool[_parts(pool)]):
        wake_shard(_shard(pool, number), now)
    _deliver(pool, now, window)
    wake_rank(pool, now, _boxes(pool, 1))
    _deliver(pool, now, window)


@compiled
def next_of_parts(pool: Ints) -> int:
    """Return the first moment (ns) at which a shard or the rank must be woken."""
    moment = next_of_rank(pool)
    for number in range(pool[_parts(pool)]):
        moment = min(moment, next_of_shard(_shard(pool, number)))
    return moment


@compiled
def _deliver(pool: Ints, now: int, window: int) -> None:
    """Deliver messages, shard by shard to the rank and then shard by shard from it, until none are left."""
    to_rank, to_shards = _boxes(pool, 0), _boxes(pool, 1)
    shards, row = len(to_rank), np.empty(ROW_WIDTH, np.int64)
    is_quiet = False
    while not is_quiet:
        is_quiet = True
        for number in range(shards):
            shard, box = _shard(pool, number), to_rank[number]
            while receive(to_shards[number], row):
                take_grant(shard, now, row[2], row[3], row[4], row[5], row[6], row[7], window, box)
            tell_candidates(shard, now, box)
        for number in range(shards):
            while receive(to_rank[number], row):
                is_quiet = False
                row[2] = row[2] * shards + number
                take_rank_row(pool, row, now, to_shards)
    for number in range(shards):
        _copy_decisions(pool, _shard(pool, number), number, shards)


@compiled
def _copy_decisions(pool: Ints, shard: Ints, number: int, shards: int) -> None:
    """Copy a shard's decisions to the policy's pool."""
    first = choose(pool, shard[NUM_CHOSEN])
    for place in range(shard[NUM_CHOSEN]):
        pool[pool[CHOSEN] + first + place] = shard[shard[CHOSEN] + place]
    for decision in range(shard[NUM_DECISIONS]):
        row = shard[DECISION] + decision * WIDTH
        kind, target, queue = shard[row], shard[row + 1], shard[row + 2] * shards + number
        begin, count, when = first + shard[row + 3], shard[row + 4], shard[row + 5]
        pool[pool[HEAD] + queue] += count
        pool[NUM_QUEUED] -= count
        if kind == DROP:
            decide_to_drop(pool, when, queue, begin, count, target)
        else:
            decide(pool, kind, target, queue, begin, count, when)
    clear(shard)


@compiled
def _parts(pool: Ints) -> int:
    """Return the cell of the number of shards; then come the offsets of their pools, the mailboxes, the pools."""
    return pool[OWN] + CELLS_OF_QUEUE * pool[NUM_QUEUES]


@compiled
def _boxes(pool: Ints, direction: int) -> Ints:
    """Return the mailboxes of all shards: direction 0 to the rank, 1 from it."""
    at = _parts(pool)
    shards = pool[at]
    first = at + shards + 2
    size = (at + pool[at + 1] - first) // 2
    return pool[first + direction * size : first + (direction + 1) * size].reshape((shards, size // shards))


@compiled
def _shard(pool: Ints, number: int) -> Ints:
    """Return the pool of a shard."""
    at = _parts(pool)
    return pool[at + pool[at + 1 + number] : at + pool[at + 2 + number]]
