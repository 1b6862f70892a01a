"""The arrival rate of each queue, and the batch size that staggered devices could serve at that rate.

Arrivals are counted for `WINDOW_NS` at a time; the rate is an exponential mean over `_MEMORY` windows. At the end of
each window the target (a batch size b) is recomputed. With N = r l(b) / b devices for this model alone, each ready
l(b) / N after the one before, requests are in time if (1 + 1/N) l(b) ≤ L; with less than one device, N < 1, if
l(b) + b / r ≤ L. Here r is the rate, l(b) the latency of a batch, and L the SLO less the slack.
"""

from __future__ import annotations

from meshwright.compiled import compiled
from meshwright.serving.policies.pool import (
    COUNT,
    MODEL,
    MOST,
    NUM_UP,
    RATE,
    SINCE,
    SLACK,
    SLO,
    TARGET,
    Ints,
)
from meshwright.serving.policies.queues import latency_of, value_work

# Symphony's code counts for 50 ms, too. The mean over a second and a first value after 64 arrivals are our choices.
WINDOW_NS = 50_000_000
_MEMORY, _SOON = 20, 64
# Shortest time for that first value: a burst at one moment says nothing about the rate.
_SOONEST_NS = WINDOW_NS // 50
# RATE is in millionths of a request per second.
PER_NS = 1e-15


@compiled
def measure_rate(pool: Ints, now: int, queue: int) -> None:
    """Count an arrival; update the queue's ``RATE`` and ``TARGET`` after each window, and once after 64 arrivals."""
    since = pool[SINCE] + queue
    count = pool[COUNT] + queue
    if pool[since] == 0:
        pool[since] = now + 1
    pool[count] += 1
    elapsed = now + 1 - pool[since]
    rate = pool[pool[RATE] + queue]
    if elapsed >= WINDOW_NS or (rate == 0 and pool[count] >= _SOON and elapsed >= _SOONEST_NS):
        measured = pool[count] / elapsed / PER_NS
        weight = 1.0 if rate == 0 else min(elapsed / (_MEMORY * WINDOW_NS), 1.0)
        pool[pool[RATE] + queue] = max(rate + int(weight * (measured - rate)), 1)
        pool[count] = 0
        pool[since] = now + 1
        target = staggered_batch(pool, queue, pool[pool[RATE] + queue] * PER_NS)
        pool[pool[TARGET] + queue] = target
        value_work(pool, queue, latency_of(pool, queue, target) // target)


@compiled
def staggered_batch(pool: Ints, queue: int, rate: float) -> int:
    """Return the largest batch that staggered devices could serve in time at a rate (requests per ns); at least 1."""
    model = pool[pool[MODEL] + queue]
    slo = pool[pool[SLO] + model] - pool[SLACK]
    for batch in range(pool[pool[MOST] + model], 1, -1):
        latency = latency_of(pool, queue, batch)
        devices = min(rate * latency / batch, float(max(pool[NUM_UP], 1)))
        needed = latency * (1.0 + 1.0 / devices) if devices >= 1.0 else latency + batch / rate
        if needed <= slo:
            return batch
    return 1
