"""Cut a sequence into slices with the smallest possible largest sum: the even cut of layers into stages.

Greedy slices of at most θ are the fewest possible. If they are few enough, their largest sum is also a valid θ; if not,
θ must reach at least the smallest sum that was refused. So the range of θ is bisected with ends that are sums that
occur. It closes after a few steps, exact to the last bit of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled


def slice_evenly(seconds: Sequence[float], num_slices: int) -> tuple[tuple[int, int], ...]:
    """Return bounds of non-empty slices with the smallest possible largest sum; ``num_slices`` <= len(``seconds``)."""
    edges = np.empty(num_slices + 1, np.int64)
    even_edges(np.array(seconds, np.float64), num_slices, edges)
    return tuple(pairwise(edges.tolist()))


@compiled
def even_edges(seconds: NDArray[np.float64], num_slices: int, edges: NDArray[np.int64]) -> None:
    """Write the edges of the slices, shape (slices + 1,): slice s is ``edges[s]:edges[s + 1]``."""
    low, high = seconds.max(), seconds.sum()
    while low < high:
        middle = low + (high - low) / 2
        # Between neighbouring floats the middle may be rounded up to the high end.
        count, largest, refused = _try(seconds, middle if middle < high else low)
        if count > num_slices:
            low = refused
        else:
            high = largest
    _fill(seconds, high, num_slices, edges)


@compiled
def _try(seconds: NDArray[np.float64], most: float) -> tuple[int, float, float]:
    """Cut greedily into slices of at most ``most``: their number, the largest sum, and the smallest refused sum."""
    count, total, largest, refused = 1, 0.0, 0.0, np.inf
    for index in range(len(seconds)):
        if index and total + seconds[index] > most:
            refused = min(refused, total + seconds[index])
            count += 1
            total = 0.0
        total += seconds[index]
        largest = max(largest, total)
    return count, largest, refused


@compiled
def _fill(seconds: NDArray[np.float64], most: float, num_slices: int, edges: NDArray[np.int64]) -> None:
    """Fill greedily; slices left over then split the first slices that have several members."""
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
