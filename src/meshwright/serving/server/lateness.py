"""Measured delays of this server, which the policy allows for when it plans batches.

    DELAY    median time from a decision to its start at the worker, of batches and of pings (messages without a batch)
    SLACK    how long before the deadline of its first request a batch must end, so that its answers are in time
    GUARD    how much earlier than needed the policy asks to be woken, as timers fire late

The slack has two causes: the scheduler learns of the end of a batch with a delay, and the frontend answers the requests
of a batch one after the other. Frontends report how long after the end of its batch a request was answered, less the
time by which its deadline is later than that of the batch's first request. The slack is the 99.9th percentile of these
times; requests above it are answered late. Until 32 of them are known, it is twice the delay of the scheduler. (The
percentile of whole batches is larger. With large batches it would cost more than it saves, as few of their requests are
due with the first one.)

The guard is the 99th percentile of the delays of timers, and at least a millisecond until 32 of them have fired. If a
batch starts late, a few of its requests are lost. Symphony uses constants: 2.1 ms (slack) and 0.1 ms (guard).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from meshwright.serving.policies.pool import DELAY, GUARD, NOMINAL, SLACK, Ints
from meshwright.spec import Deployment

# The answers of a minute at a hundred batches per second, and some thousand batches.
_KEPT_ANSWERS, _KEPT = 2**15, 4096
_ENOUGH = 32
# Older samples count only if there are too few younger ones: the cause of their delay may have passed.
_YOUNG_NS = 60_000_000_000
_RARE, _SELDOM = 0.999, 0.99
# Assumed until some timers have fired. The first ones follow long waits, when processors slept: they are 0.2 ms late on
# an idle machine (own measurement 2026-11-26), and later on others.
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
        """Return a quantile of the samples (ns), never the largest of two or more; 0 without samples."""
        if not self.count:
            return 0
        kept = self._values[: self.count]
        young = kept[self._moments[: len(kept)] > time.monotonic_ns() - _YOUNG_NS]
        if len(young) >= _ENOUGH:
            kept = young
        place = max(min(int(share * (len(kept) - 1)), len(kept) - 2), 0)
        return int(np.partition(kept, place)[place])


class Lateness:
    """Samples of delays (ns); values derived from them are limited to ``most_ns``, so that deadlines can be met."""

    def __init__(self, most_ns: int) -> None:
        self.begins, self.ends, self.timers = _Samples(), _Samples(), _Samples()
        self.answers = _Samples(_KEPT_ANSWERS)
        self.stretches = _Samples()
        self.most_ns = most_ns

    def note(self, since: int, begin: int, end: int, now: int, expected_ns: int = 0) -> None:
        """Record the delays of a batch, or of a ping if ``expected_ns`` is 0; all times are in ns.

        ``since``: when the batch was decided, or the batch before it ended. ``begin`` and ``end``: as measured by the
        worker. ``now``: when the scheduler learnt of the end. ``expected_ns``: the predicted time of the batch.
        """
        self.begins.add(begin - since)
        self.ends.add(now - end)
        if expected_ns:
            self.stretches.add((end - begin) * NOMINAL // expected_ns)

    def facts(self) -> dict[str, int]:
        """Return medians for the server's status.

        ``notice_ns``: delay after which the scheduler learns of the end of a batch; ``stretch``: measured over expected
        time of batches, in units of 1 / `NOMINAL`.
        """
        return {"notice_ns": self.ends.quantile(0.5), "stretch": self.stretches.quantile(0.5) or NOMINAL}

    @property
    def is_known(self) -> bool:
        """Whether at least 32 starts and 32 ends have been measured."""
        return min(self.begins.count, self.ends.count) >= _ENOUGH

    def known_better(self, deployment: Deployment, pool: Ints) -> Iterator[tuple[int, int]]:
        """Yield (index in the pool, measured ns) for each of delay, slack and guard that has to change in the pool.

        A value has to change if the deployment does not set it, and the measured value differs from the pool's.
        """
        for given, number, measured in (
            (deployment.delay, DELAY, self.delay_ns()),
            (deployment.slack, SLACK, self.slack_ns()),
            (deployment.guard, GUARD, self.guard_ns()),
        ):
            if not given and measured != pool[number]:
                yield number, measured

    def delay_ns(self) -> int:
        """Return the median delay (ns) from a decision to its start at the worker."""
        return min(self.begins.quantile(0.5), self.most_ns)

    def slack_ns(self) -> int:
        """Return the slack (ns): how long before its deadline a batch must end."""
        are_told = self.answers.count >= _ENOUGH
        return min(self.answers.quantile(_RARE) if are_told else 2 * self.ends.quantile(_RARE), self.most_ns)

    def guard_ns(self) -> int:
        """Return the guard (ns): how much earlier than needed the policy asks to be woken."""
        least_ns = 0 if self.timers.count >= _ENOUGH else _UNKNOWN_GUARD_NS
        return min(max(self.timers.quantile(_SELDOM), least_ns), self.most_ns)
