"""All parts of a sharded scheduler in one thread, as a policy: messages are delivered at once, in a fixed order.

The pool that the driver sees is the rank's. After the rank's own cells come the mailboxes and the pools of the shards,
each a normal pool at an offset; their decisions are copied to this pool. Its queues only count their waiting requests:
a driver cannot look at single requests, or cancel one, as a server does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.decisions import choose, decide, decide_to_drop
from meshwright.serving.policies.pool import (
    CHOSEN,
    DECISION,
    DROP,
    HEAD,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_QUEUED,
    NUM_QUEUES,
    OWN,
    TAIL,
    WIDTH,
    Ints,
)
from meshwright.serving.policies.queues import clear
from meshwright.serving.policies.sharding import FREE
from meshwright.serving.policies.sharding.mailboxes import WIDTH as ROW_WIDTH
from meshwright.serving.policies.sharding.mailboxes import cells_of_mailbox, receive
from meshwright.serving.policies.sharding.rank import (
    CELLS_OF_QUEUE,
    allocate_rank,
    next_of_rank,
    take_rank_row,
    wake_rank,
)
from meshwright.serving.policies.sharding.shard import (
    allocate_shard,
    next_of_shard,
    take_arrival,
    take_grant,
    tell_candidates,
    wake_shard,
)
from meshwright.spec import ServingError


class Sharded(NamedTuple):
    """Settings: ``shards``, of which at most one per model is made, and ``window`` as in `deferred`."""

    shards: int = 2
    window: int = 100

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return the rank's pool with all others in it. Raises ServingError if ``shards`` is 0."""
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
        """Wake the parts whose moment has come."""
        wake_parts(pool, now, self.window)

    def next_wake(self, pool: Ints) -> int:
        """Return the first moment that a part asks for."""
        return next_of_parts(pool)


_SOME_CANDIDATES = 16


@compiled
def let_in(pool: Ints, now: int, queue: int, request: int, deadline: int, window: int) -> None:
    """Pass a request to the shard of its model."""
    shards = pool[_parts(pool)]
    pool[pool[TAIL] + queue] += 1
    pool[NUM_QUEUED] += 1
    take_arrival(_shard(pool, queue % shards), now, queue // shards, request, deadline)
    _deliver(pool, now, window)


@compiled
def free_device(pool: Ints, now: int, device: int, window: int) -> None:
    """Notify the rank of a free device."""
    row = np.zeros(ROW_WIDTH, np.int64)
    row[0], row[3] = FREE, device
    take_rank_row(pool, row, now, _boxes(pool, 1))
    _deliver(pool, now, window)


@compiled
def wake_parts(pool: Ints, now: int, window: int) -> None:
    """Wake the shards, then the rank, which thus has their current candidates."""
    for number in range(pool[_parts(pool)]):
        wake_shard(_shard(pool, number), now)
    _deliver(pool, now, window)
    wake_rank(pool, now, _boxes(pool, 1))
    _deliver(pool, now, window)


@compiled
def next_of_parts(pool: Ints) -> int:
    """Return the first moment at which a part must be woken."""
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
