"""What a sum of gradients takes that is exchanged bucket by bucket, as closed forms of stages have it. Compiled."""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled


@compiled
def sum_in_buckets(num_bytes: float, bucket_bytes: float, latency_s: float, bucket_s: float) -> tuple[float, float]:
    """Seconds of all buckets one after the other, and of the last one, which no backward hides.

    ``latency_s`` and ``bucket_s`` are those of a sum of a byte and of a full bucket; what lies between is on a line.
    """
    full = np.floor(num_bytes / bucket_bytes)
    rest = num_bytes / bucket_bytes - full
    if rest > 0.0:
        last = latency_s + (bucket_s - latency_s) * rest
        return full * bucket_s + last, last
    return full * bucket_s, bucket_s
