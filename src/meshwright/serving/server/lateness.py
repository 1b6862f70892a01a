"""How late things happen in this server, measured: what batches have to be planned for.

    DELAY    what typically passes between a decision and its begin, of batches and of messages without one
    SLACK    how long before a deadline a batch has to end: what a worker has done is known late to the scheduler, and
             then to the front, which answers one request after the other. Fronts tell of answers how long after the
             end of their batch they were given, less what they were due after its first one; before they have told of
             some, it is taken to be twice what is seen at the scheduler
    GUARD    how much earlier than needed the policy asks to be woken, as timers fire late

The slack is what one of a thousand requests exceeds: it is answered late. (What one batch of a thousand exceeds is
more, and costs more than it saves where batches are large: few of their requests are due with the first one.) The guard
is what one of a hundred timers exceeds, and a millisecond before some have fired; a batch that begins late loses a few
of its requests. (Symphony has constants for them, of 2.1 and 0.1 ms.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from meshwright.serving.policies.pool import DELAY, GUARD, NOMINAL, SLACK, Ints
from meshwright.spec import Deployment

# The answers of a minute, at a hundred batches per second, and some thousand batches.
_KEPT_ANSWERS, _KEPT = 2**15, 4096
_ENOUGH = 32
# What is older counts only where there are not enough others: whatever made things late is perhaps over.
_YOUNG_NS = 60_000_000_000
_RARE, _SELDOM = 0.999, 0.99
# Until some timers have fired. The first ones follow long waits, by processors that slept: they are 0.2 ms late on an
# idle machine (own measurement 2026-11-26), and later on others.
_UNKNOWN_GUARD_NS = 1_000_000


class _Samples:
    """The last samples of a quantity."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._values, self._moments = np.zeros(kept, np.int64), np.zeros(kept, np.int64)
        self.count = 0

    def add(self, values: Ints | int) -> None:
        count = 1 if isinstance(values, int) else len(values)
        places = np.arange(self.count, self.count + count) % len(self._values)
        self._values[places], self._moments[places] = np.maximum(values, 0), time.monotonic_ns()
        self.count += count

    def quantile(self, share: float) -> int:
        """What this share of the samples is at most; the worst one of all counts only among thousands."""
        if not self.count:
            return 0
        kept = self._values[: self.count]
        young = kept[self._moments[: len(kept)] > time.monotonic_ns() - _YOUNG_NS]
        if len(young) >= _ENOUGH:
            kept = young
        place = max(min(int(share * (len(kept) - 1)), len(kept) - 2), 0)
        return int(np.partition(kept, place)[place])


class Lateness:
    """Samples of what is late; no number that follows is over ``most_ns``, so that something can be met at all."""

    def __init__(self, most_ns: int) -> None:
        self.begins, self.ends, self.timers = _Samples(), _Samples(), _Samples()
        self.answers = _Samples(_KEPT_ANSWERS)
        self.stretches = _Samples()
        self.most_ns = most_ns

    def note(self, since: int, begin: int, end: int, now: int, expected_ns: int = 0) -> None:
        """A batch that was decided, or followed another one, at ``since``, has run, and this is known now.

        Without ``expected_ns`` it was none: a message there and back.
        """
        self.begins.add(begin - since)
        self.ends.add(now - end)
        if expected_ns:
            self.stretches.add((end - begin) * NOMINAL // expected_ns)

    def facts(self) -> dict[str, int]:
        """What is measured besides: how late the scheduler knows of ends, and how long batches take, in thousandths."""
        return {"notice_ns": self.ends.quantile(0.5), "stretch": self.stretches.quantile(0.5) or NOMINAL}

    @property
    def is_known(self) -> bool:
        """Have there been enough samples?"""
        return min(self.begins.count, self.ends.count) >= _ENOUGH

    def known_better(self, deployment: Deployment, pool: Ints) -> Iterator[tuple[int, int]]:
        """Numbers of a pool that the deployment leaves open, and that are measured to be others; what they are."""
        for given, number, measured in (
            (deployment.delay, DELAY, self.delay_ns()),
            (deployment.slack, SLACK, self.slack_ns()),
            (deployment.guard, GUARD, self.guard_ns()),
        ):
            if not given and measured != pool[number]:
                yield number, measured

    def delay_ns(self) -> int:
        """See the module's docstring."""
        return min(self.begins.quantile(0.5), self.most_ns)

    def slack_ns(self) -> int:
        """See the module's docstring."""
        are_told = self.answers.count >= _ENOUGH
        return min(self.answers.quantile(_RARE) if are_told else 2 * self.ends.quantile(_RARE), self.most_ns)

    def guard_ns(self) -> int:
        """See the module's docstring."""
        least_ns = 0 if self.timers.count >= _ENOUGH else _UNKNOWN_GUARD_NS
        return min(max(self.timers.quantile(_SELDOM), least_ns), self.most_ns)
