"""The frequency with which a larger product takes less time than a smaller one, measured and predicted.

Among all rows with the same columns n and inner dimension k, each is compared with the one with the next number of
rows m, if both numbers are multiples of the same power of two, up to 64. A fall is a time at least 3 % shorter.
Measured rows also fall: libraries choose another kernel there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from meshwright.cost.prediction import Floats

# Most tiles have a multiple of 64 rows (`cost.kernels.tiles`).
_MOST_ALIGNED = 64
# Less is noise: an agreed figure, the same for measured and predicted rows.
_FALL = 0.03


def next_larger(sizes: Mapping[str, Floats]) -> NDArray[np.int64]:
    """Pairs of rows, shape (pairs, 2): the second has the next larger m at the same n, k and alignment of m."""
    m = sizes["m"].astype(np.int64)
    aligned = np.minimum(m & -m, _MOST_ALIGNED)
    groups: dict[tuple[float, ...], list[int]] = {}
    for index in np.argsort(m, kind="stable"):
        groups.setdefault((sizes["n"][index], sizes["k"][index], aligned[index]), []).append(int(index))
    pairs = [(i, j) for group in groups.values() for i, j in pairwise(group) if m[i] < m[j]]
    return np.array(pairs, np.int64).reshape(-1, 2)


def share_of_falls(seconds: Floats, pairs: NDArray[np.int64]) -> float:
    """The share of pairs, at least one, of which the larger takes less time by more than repeated runs differ."""
    smaller, larger = seconds[pairs].T
    return float((larger < (1 - _FALL) * smaller).mean())


def share_of_false_falls(predicted: Floats, measured: Floats, pairs: NDArray[np.int64]) -> float:
    """The share of pairs, at least one, of which the larger is predicted to fall and was measured to take no less."""
    (smaller, larger), (short, long) = predicted[pairs].T, measured[pairs].T
    return float(((larger < (1 - _FALL) * smaller) & (long >= short)).mean())
