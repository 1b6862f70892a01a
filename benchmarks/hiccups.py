"""A policy in virtual time, asked as the scheduler asks it (`server.live`), where single batches take far too long.

The simulator has devices that jitter or are slow, and none that are late once: what a busy machine does to a server.
"""

from __future__ import annotations

import heapq

import numpy as np

from meshwright.serving.policies.pool import DROP, NEVER, RUN
from meshwright.serving.server.live import ARRIVE, EVENT_WIDTH, FREE, UP, WAKE, Live
from meshwright.spec import Deployment

# A late batch is late by so much, any one by a little (the mean of an exponential); early refusals come within.
_LATE_NS, _USUAL_NS, _EARLY_NS = (20_000_000, 80_000_000), 200_000, 5_000_000
_LEARNING_NS = 20_000_000_000


def run_with_hiccups(
    deployment: Deployment, rate: float, seconds: float, share: float, seed: int
) -> tuple[float, float]:
    """Requests in time per second where this share of the batches is late, and the share of refusals that were.

    ``deployment`` has one model. Refusals of the first 20 s, in which our own policy learns, do not count.
    """
    (model,) = deployment.models
    table = [0, *(round(model.line.of(size) * 1e9) for size in range(1, model.line.largest + 1))]
    slo, delay, random = round(model.slo * 1e9), round((deployment.delay or 0) * 1e9), np.random.default_rng(seed)
    facts = {"latency": [table], "slo": [slo], "num_devices": deployment.devices, "capacity": 65_536}
    facts |= {"delay_ns": delay, "slack_ns": round((deployment.slack or 0) * 1e9)}
    live = Live(deployment.policy, facts | {"guard_ns": round((deployment.guard or 0) * 1e9)})
    live.take(np.array([[UP, 0, device, 0, 0, 0] for device in range(deployment.devices)], np.int64))
    arrivals = np.cumsum(random.exponential(1e9 / rate, int(rate * seconds))).astype(np.int64)
    ends: list[tuple[int, int, int]] = []
    in_time, refused, place = 0, [], 0
    while place < len(arrivals):
        event = np.zeros((1, EVENT_WIDTH), np.int64)
        now = min(int(arrivals[place]), ends[0][0] if ends else NEVER, live.next_moment)
        if ends and now == ends[0][0]:
            _, device, taken = heapq.heappop(ends)
            event[0] = FREE, now, device, 0, 0, taken
        elif now == arrivals[place]:
            event[0] = ARRIVE, now, 0, place, now + slo, 0
            place += 1
        else:
            event[0, :2] = WAKE, now
        for decisions, chosen in live.take(event):
            for kind, target, _, first, count, when in decisions.tolist():
                came = arrivals[chosen[first : first + count]]
                if kind == RUN:
                    late = int(random.uniform(*_LATE_NS)) if random.random() < share else 0
                    taken = table[count] + int(random.exponential(_USUAL_NS)) + late
                    heapq.heappush(ends, (when + taken, target, taken))
                    in_time += int((when + taken <= came + slo).sum())
                elif kind == DROP and now > _LEARNING_NS:
                    refused.append(now - came)
    return in_time / seconds, float((np.concatenate(refused) > _EARLY_NS).mean())
