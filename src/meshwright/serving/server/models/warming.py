"""Measure the time of batches of each size: a model is warmed up and timed as its worker will run it.

Sizes are 1, 2, 4, ... and the largest. Each is run twice, and the second run is timed. No larger size is tried after
one that takes longer than an answer may take. Then all sizes are timed in turn, so that disturbances of the machine
affect all of them equally, until there are enough samples or the time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from meshwright.serving.server.models.batches import check_answers
from meshwright.serving.server.models.runnable import RAISED, DeviceLost, Runnable
from meshwright.spec import MIN_SECONDS, BatchMeasurement, ServingError

REPEATS = 20
# Share of the time for growing: a size that was started within it is finished.
_GROWING = 0.5


def warm_up(
    model: Runnable,
    *,
    name: str,
    longest_s: float,
    budget_s: float = 10.0,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[BatchMeasurement, ...]:
    """Time batches of 1, 2, 4, … samples; return median and percentiles of each size.

    ``longest_s``: no larger batch is tried after one that took longer than this. ``budget_s``: seconds for all runs.
    ``repeats``: runs of each size. A size for which the model raises an exception (perhaps because memory is
    exhausted), and all larger sizes, are left out. Raises ServingError if the model raises for a single sample.
    """
    begin, largest, size = clock(), model.largest, 1
    samples: dict[int, list[float]] = {}
    while True:
        try:
            _time(model, size, clock)
            samples[size] = [_time(model, size, clock)]
        except DeviceLost:
            raise
        except RAISED as error:
            if not samples:
                raise ServingError(
                    f"Model '{name}' raised {type(error).__name__} for a single sample: "
                    f"{' '.join(str(error).split())[:500]}. Correct the model."
                ) from error
            break
        if size >= largest or samples[size][0] > longest_s or clock() - begin > _GROWING * budget_s:
            break
        size = min(2 * size, largest)
    for _ in range(repeats - 1):
        for size, seconds in samples.items():
            if clock() - begin > budget_s:
                break
            seconds.append(_time(model, size, clock))
    return tuple(_summarise(name, size, seconds) for size, seconds in samples.items())


def _time(model: Runnable, size: int, clock: Callable[[], float]) -> float:
    arrays = model.sample(size)
    begin = clock()
    answers = model.run(arrays)
    seconds = clock() - begin
    check_answers(model, answers, size)
    return seconds


def _summarise(name: str, size: int, seconds: list[float]) -> BatchMeasurement:
    median, p90, p99 = np.maximum(np.percentile(seconds, (50, 90, 99)), MIN_SECONDS).tolist()
    return BatchMeasurement(model=name, batch_size=size, seconds=median, p90_s=p90, p99_s=p99, num_samples=len(seconds))
