"""Write decisions of a policy: rows of the pool that the driver carries out (`pool`).

Drivers carry decisions out after each event, so the table has room for what one event may bring. If a policy writes
more, RuntimeError is raised, and no other cells are overwritten.
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
    """Return how many more decisions fit into the pool before the driver has to carry some out."""
    return (pool[CHOSEN] - pool[DECISION]) // WIDTH - pool[NUM_DECISIONS]


@compiled
def choices_left(pool: Ints) -> int:
    """Return how many more requests decisions can choose before the driver has to carry some out."""
    return pool[OWN] - pool[CHOSEN] - pool[NUM_CHOSEN]


@compiled
def choose(pool: Ints, count: int) -> int:
    """Reserve room for ``count`` chosen requests; return the index of the first one.

    Raises RuntimeError if they do not fit.
    """
    first = pool[NUM_CHOSEN]
    if count > pool[OWN] - pool[CHOSEN] - first:
        raise RuntimeError("The policy decides about more requests at once than fit into its pool.")
    pool[NUM_CHOSEN] = first + count
    return first


@compiled
def decide_to_drop(pool: Ints, now: int, queue: int, first: int, count: int, reason: int) -> None:
    """Decide to drop ``count`` chosen requests from index ``first`` on.

    If the previous decision drops the requests just before these, of the same queue and for the same ``reason``, it is
    extended instead.
    """
    pool[NUM_DROPPED] += count
    last = pool[DECISION] + (pool[NUM_DECISIONS] - 1) * WIDTH
    is_more = pool[NUM_DECISIONS] > 0 and pool[last] == DROP and pool[last + 1] == reason and pool[last + 2] == queue
    if is_more and pool[last + 3] + pool[last + 4] == first:
        pool[last + 4] += count
    else:
        decide(pool, DROP, reason, queue, first, count, now)


@compiled
def decide(pool: Ints, kind: int, target: int, queue: int, first: int, count: int, when: int) -> None:
    """Write a decision, a row of the pool; ``first`` and ``count`` are the range of chosen requests that it is about.

    Raises RuntimeError if the table is full.
    """
    row = pool[DECISION] + pool[NUM_DECISIONS] * WIDTH
    if row >= pool[CHOSEN]:
        raise RuntimeError("The policy makes more decisions at once than its pool has rows for.")
    pool[row] = kind
    pool[row + 1] = target
    pool[row + 2] = queue
    pool[row + 3] = first
    pool[row + 4] = count
    pool[row + 5] = when
    pool[NUM_DECISIONS] += 1
