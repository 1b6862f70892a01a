"""What a front has answered, counted for metrics: by model and status, and how long it took.

Latencies are counted in buckets, four to each doubling: bucket 4 e + m holds nanoseconds from (4 + m) 2^(e-2) on, up to
where the next begins, so that a percentile that is read off is wrong by 1/4 at most. They count from a request's first
byte to its answer.
"""

from __future__ import annotations

# Latencies of 2^42 ns, which is more than an hour, and beyond are in the last bucket.
_MOST_BITS = 42
NUM_BUCKETS = 4 * _MOST_BITS


class Counts:
    """Answers of one model, or of all that is not a model's: plain numbers, to be read at any time."""

    __slots__ = ("buckets", "latency_ns", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        # Only of status 200.
        self.buckets = [0] * NUM_BUCKETS
        self.latency_ns = 0

    def note(self, status: int) -> None:
        """An answer of this status."""
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def note_done(self, latency_ns: int) -> None:
        """An answer of status 200 with outputs."""
        self.statuses[200] = self.statuses.get(200, 0) + 1
        self.buckets[bucket_of(latency_ns)] += 1
        self.latency_ns += latency_ns


class FrontCounts:
    """Of a front: `Counts` of each model by name, and those of all else; connections."""

    def __init__(self) -> None:
        self.models: dict[str, Counts] = {}
        self.others = Counts()
        self.connections = 0
        self.accepted = 0
        self.refused = 0
        self.cancelled = 0

    def of(self, name: str) -> Counts:
        """Counts of a model, all its versions, from zero if it is new."""
        return self.models.setdefault(name, Counts())


def bucket_of(latency_ns: int) -> int:
    """The bucket of a latency."""
    bits = latency_ns.bit_length()
    if bits < 3:
        return 0
    return min(4 * (bits - 1) + (latency_ns >> (bits - 3)) - 4, NUM_BUCKETS - 1)


def bucket_begin(bucket: int) -> int:
    """The least latency of a bucket, in ns; 0 of the first ones, which are below 4 ns."""
    return (4 + bucket % 4 << bucket // 4) >> 2 if bucket >= 8 else 0
