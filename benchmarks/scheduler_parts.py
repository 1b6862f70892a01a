"""The parts of a sharded scheduler, each for a thread or process of its own.

The caller gives a part turns: in each, it reads its messages, handles events, and decides. All rows that it takes, in
their order, can be logged; `PolicyShard.take` and `Rank.take` of a fresh part make the same decisions from them again.
The compiled code of a turn does not need the GIL. A device must not fail while shards run in separate threads or
processes: a batch could be on its way to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.pool import (
    CHOSEN,
    DECISION,
    NEVER,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_QUEUED,
    NUM_QUEUES,
    OWN,
    TIMER,
    WIDTH,
    Ints,
)
from meshwright.serving.policies.queues import clear, come_up, least_of
from meshwright.serving.policies.sharding import ARRIVE, FREE, GRANT, WAKE
from meshwright.serving.policies.sharding.mailboxes import WIDTH as ROW_WIDTH
from meshwright.serving.policies.sharding.mailboxes import cells_of_mailbox, receive
from meshwright.serving.policies.sharding.policy import (
    allocate_rank,
    allocate_shard,
    next_of_rank,
    next_of_shard,
    take_arrival,
    take_grant,
    take_rank_row,
    tell_candidates,
    wake_rank,
    wake_shard,
)

_MOST_AT_ONCE = 1024


def allocate_mailboxes(num_shards: int, num_devices: int, num_candidates: int = 1024) -> Ints:
    """Return empty mailboxes of ``num_shards`` shards: [0] to the rank, [1] from it; may be copied to shared memory."""
    return np.zeros((2, num_shards, cells_of_mailbox(num_devices + num_candidates)), np.int64)


class PolicyShard:
    """Shard ``number`` of a scheduler, from the arguments of `allocate_pool` for all models and the mailboxes.

    All rows that it takes are appended to ``log``.
    """

    def __init__(
        self, facts: dict[str, Any], number: int, mailboxes: Ints, window: int = 100, log: list[Ints] | None = None
    ) -> None:
        self.pool = allocate_shard(facts, number, mailboxes.shape[1])
        self._outbox, self._inbox = mailboxes[0, number], mailboxes[1, number]
        self._window, self._log = window, log
        self._received = np.zeros((_MOST_AT_ONCE, ROW_WIDTH), np.int64)
        # Compile, or load, before there is anything to do.
        take_shard_rows(self.pool, self._received[:0], 0, window, self._outbox)
        self.turn(0, self._received[:0])

    def turn(self, now: int, arrivals: Ints) -> list[tuple[Ints, Ints]]:
        """Take messages, then rows of arrivals; return blocks of decision rows, each with the requests they choose."""
        count = receive_rows(self._inbox, self._received, now)
        taken = self.take(self._received[:count]) + self.take(arrivals)
        if next_of_shard(self.pool) <= now:
            taken += self.take(_wake_row(now))
        tell_candidates(self.pool, now, self._outbox)
        return taken

    def take(self, rows: Ints) -> list[tuple[Ints, Ints]]:
        """Take rows; send answers to grants to the rank at once, but no candidates."""
        at, pool = 0, self.pool
        taken: list[tuple[Ints, Ints]] = []
        while at < len(rows):
            at = take_shard_rows(pool, rows, at, self._window, self._outbox)
            count, chosen = int(pool[NUM_DECISIONS]), int(pool[NUM_CHOSEN])
            row, first = int(pool[DECISION]), int(pool[CHOSEN])
            if count:
                decisions = pool[row : row + count * WIDTH].reshape(-1, WIDTH).copy()
                taken.append((decisions, pool[first : first + chosen].copy()))
                clear(pool)
        if self._log is not None and len(rows):
            self._log.append(rows.copy())
        return taken


class Rank:
    """The rank of a scheduler; see `PolicyShard`. All devices are up; shards announce when they are free."""

    def __init__(self, facts: dict[str, Any], mailboxes: Ints, log: list[Ints] | None = None) -> None:
        self.pool = allocate_rank({**facts, "capacity": 2}, keep_ends=True)
        self._inboxes, self._outboxes, self._log = mailboxes[0], mailboxes[1], log
        self._received = np.zeros((_MOST_AT_ONCE, ROW_WIDTH), np.int64)
        up = np.zeros((facts["num_devices"], ROW_WIDTH), np.int64)
        up[:, 0], up[:, 3] = FREE, np.arange(len(up))
        for device in range(len(up)):
            come_up(self.pool, device, 0)
        take_rank_rows(self.pool, up, self._outboxes)
        self.turn(0)

    def turn(self, now: int) -> int:
        """Take messages of each shard in turn; return their number."""
        total, shards = 0, len(self._inboxes)
        for number, box in enumerate(self._inboxes):
            count = receive_rows(box, self._received, now)
            rows = self._received[:count]
            rows[:, 2] = rows[:, 2] * shards + number
            self.take(rows)
            total += count
        if next_of_rank(self.pool) <= now:
            self.take(_wake_row(now))
        return total

    def take(self, rows: Ints) -> None:
        """Take rows, in which queues are numbered across shards; send grants to the shards at once."""
        take_rank_rows(self.pool, rows, self._outboxes)
        if self._log is not None and len(rows):
            self._log.append(rows.copy())


def _wake_row(now: int) -> Ints:
    row = np.zeros((1, ROW_WIDTH), np.int64)
    row[0, :2] = WAKE, now
    return row


@compiled
def receive_rows(box: Ints, rows: Ints, now: int) -> int:
    """Read as many rows as there are and ``rows`` holds, each with the moment at which it is read; how many.

    ``now`` may have been looked up before a row was sent: no row is read earlier than that.
    """
    count = 0
    while count < len(rows) and receive(box, rows[count]):
        rows[count, 1] = max(now, rows[count, 1])
        count += 1
    return count


@compiled
def take_rank_rows(pool: Ints, rows: Ints, boxes: Ints) -> None:
    """Put rows through the rank."""
    for at in range(len(rows)):
        now = rows[at, 1]
        while next_of_rank(pool) <= now:
            wake_rank(pool, now, boxes)
        take_rank_row(pool, rows[at], now, boxes)


@compiled
def take_shard_rows(pool: Ints, rows: Ints, at: int, window: int, box: Ints) -> int:
    """Put rows through a shard, from ``at`` on; the first that was not taken, as decisions have to be cleared first."""
    while at < len(rows):
        kind, now = rows[at, 0], rows[at, 1]
        while least_of(pool, TIMER, NEVER) <= now and _has_room(pool):
            wake_shard(pool, now)
        if not _has_room(pool):
            return at
        if kind == ARRIVE:
            take_arrival(pool, now, rows[at, 2], rows[at, 3], rows[at, 4])
        elif kind == GRANT:
            row = rows[at]
            take_grant(pool, now, row[2], row[3], row[4], row[5], row[6], row[7], window, box)
        at += 1
    return at


@compiled
def _has_room(pool: Ints) -> bool:
    """Could one more row's decisions be written?"""
    decisions = pool[NUM_DECISIONS] + 2 * pool[NUM_QUEUES] + 2
    chosen = pool[NUM_CHOSEN] + pool[NUM_QUEUED] + 2
    return bool(decisions * WIDTH <= pool[CHOSEN] - pool[DECISION] and chosen <= pool[OWN] - pool[CHOSEN])
