"""Minimise a sum plus a bottleneck over all thresholds on the bottleneck (`minimise_over_thresholds`)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

# Relative tolerance of solution costs, which are sums of some hundred doubles.
_RELATIVE_TOLERANCE = 1e-12


class SumAndBottleneck(Protocol):
    """Interface: a solution with its cost in seconds, and the two terms of the cost."""

    @property
    def seconds(self) -> float:
        """The cost: ``sum_s + bottleneck_s``."""

    @property
    def sum_s(self) -> float:
        """The term that the dynamic program minimises, in seconds."""

    @property
    def bottleneck_s(self) -> float:
        """The term that must not exceed the threshold, in seconds."""


Found = TypeVar("Found", bound=SumAndBottleneck)


# Minimise a sum plus a bottleneck, given the least sum for every threshold on the bottleneck. For a threshold θ, a
# dynamic program yields the solution with the least sum whose parts all stay within θ, and the next value above θ at
# which anything could change. The best θ is found by bisecting the range of θ and dropping every part whose bound (its
# lowest θ plus the least sum at its highest θ) is not below the best solution found: exact, with few dynamic programs.
# Source: Zheng et al., "Alpa" (OSDI 2022), section 5.2, which tries all values of the bottleneck.
def minimise_over_thresholds(
    solve: Callable[[float], tuple[Found | None, float]], cutoff_s: float = np.inf
) -> Found | None:
    """Return the solution with the least cost; None if no solution costs less than ``cutoff_s`` seconds.

    ``solve(threshold)`` returns two values: the solution with the least sum whose bottleneck is within the threshold
    (None if there is no such solution), and the next higher threshold at which the solution may change.
    """
    best: Found | None = None
    # Parts of the range of θ still to search: (bound, lowest θ, highest θ, least sum at the highest θ).
    parts: list[tuple[float, float, float, float]] = []

    def consider(theta: float, lowest: float) -> float:
        """Run one dynamic program; return the lowest θ above ``theta`` that could matter."""
        nonlocal best
        found, above = solve(theta)
        if found is not None:
            if found.seconds < (best.seconds if best else cutoff_s):
                best = found
            if lowest < found.bottleneck_s:
                heapq.heappush(parts, (lowest + found.sum_s, lowest, found.bottleneck_s, found.sum_s))
        return above

    consider(cutoff_s, 0.0)
    while parts:
        bound, lowest, highest, least_sum = heapq.heappop(parts)
        target = best.seconds if best else cutoff_s
        if bound >= target * (1 - _RELATIVE_TOLERANCE):
            break
        above = consider(min(lowest + (highest - lowest) / 2, target - least_sum), lowest)
        if above < highest:
            heapq.heappush(parts, (above + least_sum, above, highest, least_sum))
    return best
