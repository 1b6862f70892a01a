"""What a policy has decided: rows that the driver carries out (`pool`), and how much place is left for more.

Drivers carry decisions out after each event, so that the table has place for what one event may bring; a policy that
writes more raises an error instead of writing behind it.
"""

from __future__ import annotations

from meshwright.compiled import compiled
from meshwright.serving.policies.pool import (
    CHOSEN,
    DECISION,
    DROP,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_DROPPED,
    OWN,
    WIDTH,
    Ints,
)


@compiled
def rows_left(pool: Ints) -> int:
    """How many more decisions can be written before the driver has carried some out."""
    return (pool[CHOSEN] - pool[DECISION]) // WIDTH - pool[NUM_DECISIONS]


@compiled
def choices_left(pool: Ints) -> int:
    """How many more requests decisions can be about."""
    return pool[OWN] - pool[CHOSEN] - pool[NUM_CHOSEN]


@compiled
def choose(pool: Ints, count: int) -> int:
    """Make place for so many more chosen requests; where they begin. Raises RuntimeError if there is none."""
    first = pool[NUM_CHOSEN]
    if count > pool[OWN] - pool[CHOSEN] - first:
        raise RuntimeError("The policy decides about more requests at once than its pool has place for.")
    pool[NUM_CHOSEN] = first + count
    return first


@compiled
def decide_to_drop(pool: Ints, now: int, queue: int, first: int, count: int, reason: int) -> None:
    """Drop chosen requests; those that follow others of the same queue and reason are one decision with them."""
    pool[NUM_DROPPED] += count
    last = pool[DECISION] + (pool[NUM_DECISIONS] - 1) * WIDTH
    is_more = pool[NUM_DECISIONS] > 0 and pool[last] == DROP and pool[last + 1] == reason and pool[last + 2] == queue
    if is_more and pool[last + 3] + pool[last + 4] == first:
        pool[last + 4] += count
    else:
        decide(pool, DROP, reason, queue, first, count, now)


@compiled
def decide(pool: Ints, kind: int, target: int, queue: int, first: int, count: int, when: int) -> None:
    """Write a row of decisions; ``first`` and ``count`` say which of the chosen requests it is about.

    Raises RuntimeError if the table is full.
    """
    row = pool[DECISION] + pool[NUM_DECISIONS] * WIDTH
    if row >= pool[CHOSEN]:
        raise RuntimeError("The policy decides more at once than its pool has rows for.")
    pool[row] = kind
    pool[row + 1] = target
    pool[row + 2] = queue
    pool[row + 3] = first
    pool[row + 4] = count
    pool[row + 5] = when
    pool[NUM_DECISIONS] += 1
