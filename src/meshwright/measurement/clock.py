"""The cost of the clock itself: around one op of a forward, and at one autograd node of a backward.

Measured on trivial ops: two readings in a row; a backward through a chain of views with and without hooks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_TRIVIAL_NODES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOverhead:
    """Nanoseconds that timing adds to one op's forward and to one autograd node."""

    forward_ns: float
    backward_ns: float


@cache
def clock_overhead() -> ClockOverhead:
    """Measure what the clock costs, on trivial ops; once per process."""
    samples = []
    for _ in range(200):
        start = time.perf_counter_ns()
        middle = time.perf_counter_ns()
        samples.append(time.perf_counter_ns() - middle + middle - start)
    differences = []
    for _ in range(15):
        plain, hooked = _trivial_backward(hooked=False), _trivial_backward(hooked=True)
        differences.append(hooked - plain)
    return ClockOverhead(
        forward_ns=statistics.median(samples), backward_ns=max(statistics.median(differences) / _TRIVIAL_NODES, 0.0)
    )


def _trivial_backward(*, hooked: bool) -> int:
    """Nanoseconds of a backward through a chain of views of one small tensor."""
    leaf = torch.zeros(16, requires_grad=True)
    stamps: list[int] = []
    order: list[int] = []
    value = leaf
    for index in range(_TRIVIAL_NODES):
        value = value.view(16)
        if hooked:
            assert value.grad_fn is not None
            value.grad_fn.register_hook(stamp_hook(index, stamps, order))
    seed = torch.ones(16)
    start = time.perf_counter_ns()
    torch.autograd.backward([value], [seed])
    return time.perf_counter_ns() - start


def stamp_hook(index: int, stamps: list[int], order: list[int]) -> Callable[..., None]:
    """A hook for an autograd node: notes when the node ended, and which it was."""

    def hook(*_: Any) -> None:
        stamps.append(time.perf_counter_ns())
        order.append(index)

    return hook
