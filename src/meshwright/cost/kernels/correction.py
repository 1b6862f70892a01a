"""Stage three, for a device with few rows: the residuals of both stages on these rows, carried to similar queries.

    r(x) = Σ over rows wᵢ · a²·exp(-|x - xᵢ|²/(2·d)),   w = (K + s²·1)⁻¹ · residuals

a is the error of the law alone on measured devices, s that of the fitted model on held-out rows, x the first features
of a query divided by their spread over the training rows, d their number: only w is fitted to the rows. Source:
Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshwright.cost.prediction import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """``points`` of shape (rows, features) in units of the spread, and their ``weights``, shape (rows,)."""

    points: Floats
    weights: Floats

    def evaluate(self, places: Floats) -> Floats:
        """Return the correction of ln seconds at each place, shape (queries,), given (queries, features)."""
        return _likeness(places, self.points) @ self.weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scale:
    """Scales from the training rows: ``spread`` of the features (features,), ``amplitude`` a and ``noise`` s."""

    spread: Floats
    amplitude: float
    noise: float

    def place(self, columns: NDArray[np.float32]) -> Floats:
        """Return features of shape (features, queries) as places, shape (queries, features used)."""
        used = columns[: len(self.spread)].T.astype(np.float64)
        return used / self.spread


def fit_correction(places: Floats, residuals: Floats, scale: Scale) -> Correction:
    """Return the correction through rows at these places (rows, features) with these residuals (rows,)."""
    covariance = scale.amplitude**2 * _likeness(places, places) + scale.noise**2 * np.eye(len(places))
    weights: Floats = scale.amplitude**2 * np.linalg.solve(covariance, residuals).astype(np.float64)
    return Correction(points=places, weights=weights)


def _likeness(here: Floats, there: Floats) -> Floats:
    distance = (here**2).sum(1)[:, None] + (there**2).sum(1)[None, :] - 2 * here @ there.T
    likeness: Floats = np.exp(-np.maximum(distance, 0.0) / (2 * here.shape[1]))
    return likeness
