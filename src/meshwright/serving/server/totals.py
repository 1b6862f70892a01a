"""A server's counts since its start, summed over the reports of its processes.

The counts of ended processes are kept, so that no figure decreases. Only what a process has counted since its last
report, at most a second before its end, is lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from meshwright.serving.server.gate import Fate

# For requests without a known model: it does not exist, the token is wrong, or the request is invalid.
NO_MODEL = ""


class ModelTotals:
    """Counts of one model.

    Answers by status, latencies of answers with status 200 (`counters`), samples by outcome, and batches.
    """

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.buckets: Counter[int] = Counter()
        self.latency_ns = 0
        self.fates: Counter[str] = Counter()
        self.num_batches = 0


class Totals:
    """Counts of a server since its start.

    ``models``: `ModelTotals` by name. ``cancelled``: number of requests whose clients disconnected. ``refused``: number
    of connections over the limit.
    """

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        self.cancelled = self.refused = 0

    def add(self, facts: dict[str, Any]) -> None:
        """Add the last report of a frontend or scheduler; other processes have no counts."""
        self.cancelled += facts.get("cancelled", 0)
        self.refused += facts.get("refused", 0)
        for name, counts in facts.get("answers", []):
            model = self.models[name]
            model.statuses.update(counts["statuses"])
            model.buckets.update({int(place): count for place, count in counts["buckets"].items()})
            model.latency_ns += counts["latency_ns"]
        for name, fate, count in facts.get("fates", []):
            self.models[name].fates[Fate(fate).name.lower()] += count
        for name, count in facts.get("batches", []):
            self.models[name].num_batches += count
