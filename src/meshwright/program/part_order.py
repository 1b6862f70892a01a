"""ByteScheduler's order of the parts of a gradient exchange (`order_parts`).

A part of a gradient exchange is ready at some moment, takes some time on the links that its group shares, and is the
more urgent the nearer to the input it is needed. While credit is left, the most urgent ready part is admitted and
sent after those that were admitted before; at its end it returns its bytes to the credit. No admitted part is
overtaken, so

    in flight ≤ max(credit, one part)

A small credit lets urgent parts pass early, a large one keeps the links busy where starting takes time. One clock
decides for all ranks, so they reach the collectives in one order. Source: Peng et al. (SOSP 2019), sections 4.1 and
4.2.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyPart:
    """One part: when its gradients are ready, how long it takes, and how urgent it is (smaller is more urgent)."""

    index: int
    stage: int
    num_bytes: int
    ready_ps: int
    duration_ps: int
    urgency: int


def order_parts(parts: Sequence[ReadyPart], credit_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return (moment of admission, index) of every part of one group, in the order in which they are sent."""
    coming = sorted(parts, key=lambda part: (part.ready_ps, part.urgency))[::-1]
    ready: list[tuple[int, int]] = []
    known = {part.index: part for part in parts}
    leaving: list[tuple[int, int]] = []
    admitted: list[tuple[int, int]] = []
    now, free_ps, in_flight = 0, 0, 0
    while coming or ready:
        while coming and coming[-1].ready_ps <= now:
            part = coming.pop()
            heapq.heappush(ready, (part.urgency, part.index))
        while leaving and leaving[0][0] <= now:
            in_flight -= heapq.heappop(leaving)[1]
        while ready and (not in_flight or in_flight + known[ready[0][1]].num_bytes <= credit_bytes):
            part = known[heapq.heappop(ready)[1]]
            free_ps = max(free_ps, now) + part.duration_ps
            heapq.heappush(leaving, (free_ps, part.num_bytes))
            in_flight += part.num_bytes
            admitted.append((now, part.index))
        moments = [part.ready_ps for part in coming[-1:]] + [leaving[0][0] for _ in leaving[:1]]
        now = min(moments, default=now)
    return tuple(admitted)
