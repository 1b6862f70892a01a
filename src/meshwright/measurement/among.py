"""The time that a collective adds to the computations around it, on processors.

There the threads that compute and those that move data share cores and wait for each other's time slices: after a
computation a collective starts later on one rank than on another, occasionally it takes a slice longer, and the data
still to be sent when a rank has its result slows the next computation down. Timing the collective by itself shows none
of that. So the time is

    (seconds of k times a computation and the collective - seconds of k times the computation) / k
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from meshwright.measurement.transfers import Timing
from meshwright.spec.measurements import MIN_SECONDS

# About one slice of Linux' scheduler, and the time of a layer of a small model; from products of this number of rows.
_COMPUTE_S, _ROWS = 0.005, 256
# k: the data left to be sent after the last one is not counted.
_COUNT = 5


class Computation:
    """Products that take a processor about 5 ms; all ranks, which create one together, use the same number."""

    def __init__(self) -> None:
        self._factor = torch.full((_ROWS, _ROWS), 1 / _ROWS)
        self._num_products = 10
        self()
        start = time.perf_counter()
        self()
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._num_products = max(round(self._num_products * _COMPUTE_S / float(slowest)), 1)

    def __call__(self) -> None:
        """Compute once."""
        for _ in range(self._num_products):
            torch.mm(self._factor, self._factor)


def sample_seconds(once_s: float) -> float:
    """The approximate time of one sample of `time_among`, for a collective that takes ``once_s``."""
    return _COUNT * (2 * _COMPUTE_S + once_s)


def time_among(action: Callable[[], object], computation: Computation, repeats: int) -> Timing:
    """Time a collective between computations: the mean of samples without the smallest and the largest.

    All ranks of the world call it together; those that take no part in the collective pass an empty action.
    """
    samples = np.array([_sample(action, computation) for _ in range(repeats + 1)][1:])
    seconds, host_s = np.sort(samples, axis=0).T
    low, middle, high = np.percentile(seconds, (10, 50, 90))
    inner = slice(1, -1) if repeats > 2 else slice(None)
    return Timing(
        seconds=max(float(seconds[inner].mean()), MIN_SECONDS),
        spread=float(high - low) / max(float(middle), MIN_SECONDS),
        host_s=max(float(host_s[inner].mean()), 0.0),
        num_samples=repeats * _COUNT,
    )


def _sample(action: Callable[[], object], computation: Computation) -> tuple[float, float]:
    """Seconds, and processor seconds, that each collective adds."""

    def both() -> None:
        computation()
        action()

    (with_s, with_host_s), (alone_s, alone_host_s) = _elapsed(both), _elapsed(computation)
    return (with_s - alone_s) / _COUNT, (with_host_s - alone_host_s) / _COUNT


def _elapsed(action: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    host, start = time.process_time(), time.perf_counter()
    for _ in range(_COUNT):
        action()
    return time.perf_counter() - start, time.process_time() - host
