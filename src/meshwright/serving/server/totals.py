"""What a server has counted since its start, of what its processes have reported.

What a process had counted when it ended is kept, so that no figure ever falls but for its last second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from meshwright.serving.server.gate import Fate

# Of what was asked of no model that is there: it is not known, or nobody may ask, or it is no request at all.
NO_MODEL = ""


class ModelTotals:
    """Of one model: answers by status and how long those of 200 took (`counters`), samples by fate, batches."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.buckets: Counter[int] = Counter()
        self.latency_ns = 0
        self.fates: Counter[str] = Counter()
        self.num_batches = 0


class Totals:
    """``models`` by name; ``cancelled`` requests, and connections that were one too many (``refused``)."""

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        self.cancelled = self.refused = 0

    def add(self, facts: dict[str, Any]) -> None:
        """Add what a process has last reported: a front, or a scheduler; of others there is nothing."""
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
