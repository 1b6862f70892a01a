"""Seconds of a gradient reduction bucket by bucket, in the closed form that estimates of stages use. Compiled."""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled


@compiled
def sum_in_buckets(num_bytes: float, bucket_bytes: float, latency_s: float, bucket_s: float) -> tuple[float, float]:
    """Return the seconds of all buckets one after the other, and of the last one, which no backward hides.

    ``latency_s`` and ``bucket_s`` are the seconds to reduce one byte and a full bucket; sizes between are interpolated
    linearly.
    """
    full = np.floor(num_bytes / bucket_bytes)
    rest = num_bytes / bucket_bytes - full
    if rest > 0.0:
        last = latency_s + (bucket_s - latency_s) * rest
        return full * bucket_s + last, last
    return full * bucket_s, bucket_s
