"""Slices of a sequence whose largest sum is the least possible: the even cut of layers into stages.

The smallest θ for which greedy slices of at most θ suffice is found by bisection; it is exact to the last bit of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compiled import compiled

_BISECTIONS = 64


def slice_evenly(seconds: Sequence[float], num_slices: int) -> tuple[tuple[int, int], ...]:
    """Bounds of non-empty slices whose largest sum is the least possible; no more slices than there are numbers."""
    edges = np.empty(num_slices + 1, np.int64)
    even_edges(np.array(seconds, np.float64), num_slices, edges)
    return tuple(pairwise(edges.tolist()))


@compiled
def even_edges(seconds: NDArray[np.float64], num_slices: int, edges: NDArray[np.int64]) -> None:
    """Write the edges of the slices, shape (slices + 1,): slice s is ``edges[s]:edges[s + 1]``."""
    low, high = seconds.max(), seconds.sum()
    for _ in range(_BISECTIONS):
        middle = low + (high - low) / 2
        if not low < middle < high:
            break
        if _count_slices(seconds, middle, num_slices) <= num_slices:
            high = middle
        else:
            low = middle
    if _count_slices(seconds, low, num_slices) <= num_slices:
        high = low
    _fill(seconds, high, num_slices, edges)


@compiled
def _count_slices(seconds: NDArray[np.float64], most: float, enough: int) -> int:
    """Slices that are filled one after the other; one more than enough where they do not suffice."""
    count, total = 1, 0.0
    for index in range(len(seconds)):
        if index and total + seconds[index] > most:
            count += 1
            total = 0.0
            if count > enough:
                break
        total += seconds[index]
    return count


@compiled
def _fill(seconds: NDArray[np.float64], most: float, num_slices: int, edges: NDArray[np.int64]) -> None:
    """Fill greedily; what is left of the slices then cuts the first ones that have several members."""
    edges[0] = 0
    made, total = 0, 0.0
    for index in range(len(seconds)):
        if index and total + seconds[index] > most:
            made += 1
            edges[made] = index
            total = 0.0
        total += seconds[index]
    made += 1
    edges[made] = len(seconds)
    place = 0
    while made < num_slices:
        if edges[place + 1] - edges[place] > 1:
            for other in range(made, place, -1):
                edges[other + 1] = edges[other]
            edges[place + 1] = edges[place] + 1
            made += 1
        place += 1
