"""Measure each distinct op of a captured model inside a training step: forward, backward and accumulation.

Every repetition runs the model three times on one thread: as a whole (the check), op by op with new gradients, and op
by op adding to existing gradients. The repetitions are ordered by their total time, and times are averaged over the
middle half of them. So the times add up to a typical pass, without the slowest and the fastest ones. Ops with the same
key are averaged over all their occurrences in the model.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.measurement.clocks import SegmentRunner
from meshwright.measurement.segments import OpSource, build_segments
from meshwright.spec import EventSink, MeasurementError, NullSink, OpMeasurement

_MIN_REPEATS = 3


class Company(Protocol):
    """The interface to the other processes that measure at the same time."""

    def wait(self) -> None:
        """Wait until all processes have called this method, so that they start the next repetition together."""

    def agree(self, count: int) -> int:
        """Return the smallest of the counts that the processes pass."""


class Alone:
    """The `Company` of a process that measures without other processes."""

    def wait(self) -> None:
        """Do nothing, because there is no other process."""

    def agree(self, count: int) -> int:
        """Return ``count``, because there is no other process."""
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRun:
    """The times of all distinct ops of a model, and a check of their sum, in seconds.

    ``forward_s``, ``backward_s``: whole passes, timed without hooks. ``summed_forward_s``, ``summed_backward_s``: sums
    over all ops.
    """

    ops: tuple[OpMeasurement, ...]
    forward_s: float
    backward_s: float
    summed_forward_s: float
    summed_backward_s: float

    @property
    def residual(self) -> float:
        """The share of a whole pass that its ops do not explain: (whole - sum of the ops) / whole."""
        whole = self.forward_s + self.backward_s
        return (whole - self.summed_forward_s - self.summed_backward_s) / whole


def measure_ops(
    source: OpSource,
    batch_size: int,
    *,
    repeats: int = 10,
    budget_s: float = 60.0,
    max_bytes: int = 8 * 2**30,
    company: Company | None = None,
    events: EventSink | None = None,
) -> OpRun:
    """Return the times of every distinct op of a model at a batch size, measured on the calling thread.

    ``repeats``: repetitions; fewer (but at least 3) if they would take longer than ``budget_s`` seconds. ``company``:
    other processes that measure at the same time. The caller sets the number of threads and the core. Raises
    MeasurementError if ``repeats`` is below 3 or the ops need more than ``max_bytes``, GraphError for a batch size that
    the graph does not support.
    """
    if repeats < _MIN_REPEATS:
        raise MeasurementError(
            f"The number of repetitions is {repeats}; a typical time needs at least {_MIN_REPEATS}. Give more."
        )
    sink, others = events or NullSink(), company or Alone()
    segments = build_segments(source, batch_size, max_bytes=max_bytes)
    runners = [SegmentRunner(segment) for segment in segments]
    # The first repetition only warms up the allocator and oneDNN's primitive cache, and shows the time of one.
    start = time.perf_counter()
    _one_repetition(runners)
    affordable = int(budget_s / (time.perf_counter() - start))
    count = others.agree(max(_MIN_REPEATS, min(repeats, affordable)))
    passes = []
    for done in range(count):
        others.wait()
        passes.append(_one_repetition(runners))
        sink.progress(f"measure ops of {source.graph.name}, batch {batch_size}", done + 1, count)
    keys = [segment.keys[name] for segment, runner in zip(segments, runners, strict=True) for name in runner.names]
    return _summarise(keys, np.array([item.whole for item in passes]), np.array([item.by_op for item in passes]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Repetition:
    """``whole``: seconds of forward and backward as a whole. ``by_op``: (3, ops): forward, backward, accumulation."""

    whole: tuple[float, float]
    by_op: NDArray[np.float64]


def _one_repetition(runners: list[SegmentRunner]) -> _Repetition:
    for runner in runners:
        runner.clear_gradients()
    whole_forward = sum(runner.forward() for runner in runners)
    whole_backward = sum(runner.backward() for runner in reversed(runners))
    for runner in runners:
        runner.clear_gradients()
    forward, backward, stolen = _timed_pass(runners)
    _, _, added = _timed_pass(runners)
    return _Repetition(
        whole=(whole_forward, whole_backward),
        by_op=np.stack([forward, backward, added - stolen]),
    )


def _timed_pass(runners: list[SegmentRunner]) -> tuple[NDArray[np.float64], ...]:
    """Seconds per op over all runners: forward, backward, and the part of the backward that is AccumulateGrad."""
    forward = [runner.timed_forward() for runner in runners]
    backward = [runner.timed_backward() for runner in reversed(runners)][::-1]
    return (
        np.concatenate(forward),
        np.concatenate([total for total, _ in backward]),
        np.concatenate([accumulate for _, accumulate in backward]),
    )


def _summarise(keys: list[str], whole: NDArray[np.float64], by_op: NDArray[np.float64]) -> OpRun:
    """``whole``: (repetitions, 2); ``by_op``: (repetitions, 3, ops)."""
    typical = _middle_half(by_op, by_op[:, :2].sum(axis=(1, 2))).clip(min=0.0)
    low, middle, high = np.percentile(by_op[:, 0], (10, 50, 90), axis=0)
    spread = np.divide(high - low, middle, out=np.zeros_like(middle), where=middle > 0)
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    whole_forward, whole_backward = _middle_half(whole, whole.sum(axis=1))
    return OpRun(
        ops=tuple(
            OpMeasurement(
                key=key,
                forward_s=float(typical[0, where].mean()),
                backward_s=float(typical[1, where].mean()),
                accumulate_s=float(typical[2, where].mean()),
                num_samples=len(by_op) * len(where),
                spread=float(spread[where].mean()),
            )
            for key, where in places.items()
        ),
        forward_s=float(whole_forward),
        backward_s=float(whole_backward),
        summed_forward_s=float(typical[0].sum()),
        summed_backward_s=float(typical[1].sum()),
    )


def _middle_half(values: NDArray[np.float64], totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the repetitions (first axis) whose totals lie in the middle half."""
    drop = len(totals) // 4
    return np.asarray(values[np.argsort(totals)[drop : len(totals) - drop]].mean(axis=0))
