"""Seconds as a function of size, through measured points: for messages (bytes) and optimizer steps (elements).

    t(x) = linear between neighbouring points; t(smallest) below; the last segment's slope above

Points are first made monotonic in size (running maximum), so that noise cannot make a larger size cheaper. On data of
the form α + β·x the curve is exactly α + β·x from the smallest point on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Measured points: ``sizes`` ascending, ``seconds`` non-decreasing, both of shape (points,)."""

    sizes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    def at(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds at each of the sizes (same shape)."""
        above: NDArray[np.float64] = np.maximum(sizes - self.sizes[-1], 0.0)
        return np.interp(sizes, self.sizes, self.seconds) + self._slope_above() * above

    def _slope_above(self) -> float:
        if len(self.sizes) == 1:
            return float(self.seconds[0] / self.sizes[0]) if self.sizes[0] else 0.0
        return float((self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2]))


def fit_curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Return the curve through (size, seconds) points, at least one; equal sizes are averaged."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(float(size), []).append(seconds)
    sizes = sorted(by_size)
    means = np.array([np.mean(by_size[size]) for size in sizes])
    return Curve(sizes=np.array(sizes), seconds=np.maximum.accumulate(means))
