"""Peers of the scheduler: frontends and workers, and the batches of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import LATE, LEVEL_BIT, Ints
from meshwright.serving.server.channel import MessageChannel
from meshwright.serving.server.gate import Fate

# A request's number: the lower 32 bits are its slot, the bits above are the number of its frontend's connection, and
# the uppermost bits may be a level (`policies.ordering`).
SLOT_BITS = 32
_SLOT, _FRONT = (1 << SLOT_BITS) - 1, (1 << LEVEL_BIT - SLOT_BITS) - 1
# Requests that a queue holds, and slots of a model in a frontend.
CAPACITY = 65_536
# Messages without a batch, which measure the delay to a worker.
PINGS = 64
# Up to this multiple of its expected time, a batch counts as slow and its worker not as stuck.
STUCK = 20


@dataclass(slots=True, eq=False)
class FrontendPeer:
    """The connection of a frontend to the scheduler.

    ``submitted[model][slot]`` is the last request in this slot: (slot with level, deadline in ns). ``known`` is the
    generation of models (`Catalog`) that the frontend has confirmed.
    """

    channel: MessageChannel
    number: int
    known: int = 0
    submitted: dict[int, Ints] = field(default_factory=dict)

    def keep(self, rows: Ints) -> None:
        """Record submitted requests, given as rows of (model, slot with level, deadline in ns)."""
        first = int(rows[0, 0])
        models = [first] if (rows[:, 0] == first).all() else np.unique(rows[:, 0]).tolist()
        for model in models:
            if model not in self.submitted:
                self.submitted[model] = np.zeros((CAPACITY, 2), np.int64)
            mine = rows if len(models) == 1 else rows[rows[:, 0] == model]
            self.submitted[model][slots_of(mine[:, 1])] = mine[:, 1:]


@dataclass(slots=True, eq=False)
class WorkerBatch:
    """Requests of a model that a worker computes, or will compute.

    The policy's batch may be sent in parts (`Suspects.parts_of`). ``decided`` is the number of requests of the whole
    batch; ``is_last`` marks the last part.
    """

    number: int
    model: int
    requests: Ints
    decided: int
    expected_ns: int
    is_last: bool

    @property
    def is_part(self) -> bool:
        """Whether this is only a part of the policy's batch."""
        return len(self.requests) < self.decided

    def fates(self, late: Ints, failed: Ints) -> Iterator[tuple[Ints, int]]:
        """Yield (requests, outcome) for each outcome.

        ``late`` and ``failed`` are the indices of requests that were not computed, and of requests that failed.
        """
        if len(late) or len(failed):
            is_done = np.ones(len(self.requests), bool)
            is_done[late] = is_done[failed] = False
            yield self.requests[late], LATE
            yield self.requests[failed], Fate.FAILED
            yield self.requests[is_done], Fate.DONE
        else:
            yield self.requests, Fate.DONE


@dataclass(slots=True, eq=False)
class WorkerPeer:
    """The connection of a worker to the scheduler.

    ``held`` and ``loading``: numbers of the models that the worker has loaded, and is loading. ``pings``: number of
    pings still to be sent. ``batches``: the worker computes the first one, since ``since_ns``; the others wait.
    """

    channel: MessageChannel
    device: int
    pid: int
    held: set[int] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    pings: int = PINGS
    batches: deque[WorkerBatch] = field(default_factory=deque)
    since_ns: int = 0

    def give(self, batch: WorkerBatch, now: int) -> None:
        """Add a batch for the worker to compute."""
        if not self.batches:
            self.since_ns = now
        self.batches.append(batch)

    def take(self, now: int) -> WorkerBatch:
        """Remove and return the first batch, which the worker has computed."""
        self.since_ns = now
        return self.batches.popleft()

    def outlook(self, now: int) -> tuple[int, int, int]:
        """Return the number of the worker's batches, the start of the first, and the expected end of the last (ns).

        A batch that is sent in parts counts once.
        """
        if not self.batches:
            return 0, now, now
        left = sum(batch.expected_ns for batch in self.batches)
        return sum(batch.is_last for batch in self.batches), self.since_ns, max(self.since_ns + left, now)

    def stuck_ns(self, now: int, limit_ns: int) -> int:
        """Return for how long (ns) the worker has computed its batch if that is too long; otherwise 0.

        Too long: over ``limit_ns``, and over `STUCK` times the expected time.
        """
        if not self.batches:
            return 0
        taken = now - self.since_ns
        return taken if taken > max(limit_ns, STUCK * self.batches[0].expected_ns) else 0


def slots_of(requests: Ints) -> Ints:
    """Return the slots of requests, which are the lower bits of their numbers."""
    return requests & _SLOT


def front_of(request: int) -> int:
    """Return the number of the frontend's connection that a request came from, ignoring its level."""
    return request >> SLOT_BITS & _FRONT


def by_front(requests: Ints) -> list[tuple[int, Any]]:
    """Return (number of a frontend's connection, mask or slice of its requests) for each frontend of ``requests``."""
    numbers = requests >> SLOT_BITS
    if len(numbers) == 0:
        return []
    first = int(numbers[0])
    if (numbers == first).all():
        return [(first, slice(None))]
    return [(number, numbers == number) for number in np.unique(numbers).tolist()]
