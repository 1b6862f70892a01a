"""Counts of a frontend's answers, for metrics: by model and status, with latencies.

Latencies are counted in buckets, four to each doubling: bucket 4 e + m starts at (4 + m) 2^(e-2) nanoseconds and ends
where the next one starts, so that a percentile from them is wrong by at most 1/4. A latency is the time from a
request's first byte to its answer.
"""

from __future__ import annotations

# Latencies of 2^42 ns, more than an hour, and above are in the last bucket.
_MOST_BITS = 42
NUM_BUCKETS = 4 * _MOST_BITS


class Counts:
    """Counts of the answers of one model, or of all requests that named no served model.

    ``statuses`` counts answers by HTTP status. ``buckets`` and ``latency_ns`` (the sum) are of answers with outputs.
    """

    __slots__ = ("buckets", "latency_ns", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        # For answers of status 200 only.
        self.buckets = [0] * NUM_BUCKETS
        self.latency_ns = 0

    def note(self, status: int) -> None:
        """Count an answer of an HTTP status, without its latency."""
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def note_done(self, latency_ns: int) -> None:
        """Count an answer of status 200 with outputs, and its latency (ns)."""
        self.statuses[200] = self.statuses.get(200, 0) + 1
        self.buckets[bucket_of(latency_ns)] += 1
        self.latency_ns += latency_ns


class FrontCounts:
    """Counts of a frontend.

    ``models``: answers by model; ``others``: answers to requests that named no served model. ``connections``: open
    client connections; ``accepted`` and ``refused``: all so far. ``cancelled``: requests whose clients disconnected.
    """

    def __init__(self) -> None:
        self.models: dict[str, Counts] = {}
        self.others = Counts()
        self.connections = 0
        self.accepted = 0
        self.refused = 0
        self.cancelled = 0

    def of(self, name: str) -> Counts:
        """Return the counts of a model, all its versions together; zeros for a new model."""
        return self.models.setdefault(name, Counts())


def bucket_of(latency_ns: int) -> int:
    """Return the number of the bucket that counts a latency (ns)."""
    bits = latency_ns.bit_length()
    if bits < 3:
        return 0
    return min(4 * (bits - 1) + (latency_ns >> (bits - 3)) - 4, NUM_BUCKETS - 1)


def bucket_begin(bucket: int) -> int:
    """Return the least latency (ns) that a bucket counts; 0 for the buckets below 4 ns."""
    return (4 + bucket % 4 << bucket // 4) >> 2 if bucket >= 8 else 0
