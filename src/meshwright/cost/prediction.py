"""Predictions: seconds with an 80 % interval and their basis, for many queries at once.

    t_low ≤ t ≤ t_high for four out of five held-out rows of the predictor's fit

The interval comes from residuals of held-out rows: with r = ln(measured / predicted) and q its quantiles, [t·exp(q₁₀),
t·exp(q₉₀)]. Source: split conformal prediction (Lei et al., JASA 2018), on the logarithm of the ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# From the most to the least certain: the row itself; its neighbours in a measured series; a regressor fitted on rows of
# this device; rows of other devices, or scaled from another size; only the datasheet.
Basis = Literal["measured", "interpolated", "regressed", "transferred", "roofline"]
BASES: tuple[Basis, ...] = ("measured", "interpolated", "regressed", "transferred", "roofline")

# The share of held-out rows that an interval is meant to contain.
INTERVAL_SHARE = 0.8

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """Seconds of n queries with their 80 % intervals, each of shape (n,), and their basis."""

    seconds: Floats
    low_s: Floats
    high_s: Floats
    basis: tuple[Basis, ...]

    def select(self, rows: NDArray[np.bool_]) -> Predictions:
        """Return the queries where a mask of shape (n,) is true."""
        basis = tuple(name for name, kept in zip(self.basis, rows, strict=True) if kept)
        return Predictions(seconds=self.seconds[rows], low_s=self.low_s[rows], high_s=self.high_s[rows], basis=basis)


def join_predictions(parts: Sequence[Predictions]) -> Predictions:
    """Return all queries of all parts (at least one), in order."""
    return Predictions(
        seconds=np.concatenate([part.seconds for part in parts]),
        low_s=np.concatenate([part.low_s for part in parts]),
        high_s=np.concatenate([part.high_s for part in parts]),
        basis=tuple(basis for part in parts for basis in part.basis),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Factors around a prediction: measured / predicted is in [low, high] for 80 % of held-out rows."""

    low: float
    high: float

    def around(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Return the lower and the upper end of the interval of each prediction (same shape)."""
        return seconds * self.low, seconds * self.high


def fit_interval(measured: Floats, predicted: Floats) -> Interval:
    """Return the interval of a predictor from held-out rows: both of shape (rows,), at least one row.

    The quantiles are those of split conformal prediction: the ⌈(n + 1)·q⌉-th smallest, so that few rows give a wider
    interval, not an overconfident one.
    """
    ratios = np.sort(np.log(measured / predicted))
    count = len(ratios)
    outside = (1.0 - INTERVAL_SHARE) / 2
    low = max(int(np.floor((count + 1) * outside)) - 1, 0)
    high = min(int(np.ceil((count + 1) * (1.0 - outside))) - 1, count - 1)
    return Interval(low=float(np.exp(ratios[low])), high=float(np.exp(ratios[high])))
