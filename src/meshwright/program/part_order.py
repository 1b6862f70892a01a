"""ByteScheduler's order of the parts of a gradient exchange (`order_parts`).

Each part of a gradient exchange becomes ready at some time, takes some time on the links that its group shares, and is
the more urgent the nearer its layers are to the model's input. The credit is the number of bytes that may be in flight.
While credit is left, the most urgent ready part is admitted and sent after all parts that were admitted before. When
its transfer ends, its bytes are available again. No admitted part is overtaken, so

    bytes in flight ≤ max(credit, one part)

With a small credit, urgent parts are sent early; with a large credit, the links stay busy even if starting a transfer
takes time. One clock decides for all ranks, so that all ranks reach the collectives in one order. Source: Peng et al.
(SOSP 2019), sections 4.1 and 4.2.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyPart:
    """One part of a bucket: when its gradients are ready (ps), how long its sum takes (ps), and its urgency.

    A smaller ``urgency`` is more urgent.
    """

    index: int
    stage: int
    num_bytes: int
    ready_ps: int
    duration_ps: int
    urgency: int


def order_parts(parts: Sequence[ReadyPart], credit_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return (time of admission in ps, ``index``) of every part of one group of ranks, in the order of sending."""
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
