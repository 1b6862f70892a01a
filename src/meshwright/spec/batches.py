"""Latency of a whole model by batch size: a line through measurements (`fit_latency`), names in tables (`name_model`).

    l(b) = αb + β        seconds of a batch of b samples; α, β >= 0

`fit_latency` finds the line with the least Σ w((αb + β) / t - 1)²: errors are relative to the measured time t, so that
the smallest batch weighs as much as the largest. Source of the model: Nexus (SOSP 2019).

Both functions are in `spec` because `report` and the packages that plan batches use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec.errors import MeasurementError
from meshwright.spec.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray


def name_model(reference: str, sizes: Iterable[tuple[str, int]] = ()) -> str:
    """Return the name of a model in measurement tables.

    It is the model reference as the user typed it, followed by ``sizes``, sorted by name: ``gpt-tiny``,
    ``gpt-tiny(sequence_length=64)``, ``mine.py:build(image_size=32, sequence_length=8)``. ``sizes`` are (name, value)
    pairs as in a plan's ``model_sizes``, without the batch size.
    """
    given = ", ".join(f"{name}={size}" for name, size in sorted(sizes))
    return f"{reference}({given})" if given else reference


def fit_latency(sizes: ArrayLike, seconds: ArrayLike, weights: ArrayLike | None = None) -> tuple[float, float]:
    """Return α (s per sample) and β (s) of the line l(b) = αb + β that fits measured batches best.

    Both are at least 0. The fit minimises the weighted sum of squared relative errors.

    Args:
        sizes: Batch sizes b, shape (n,).
        seconds: Measured seconds of a batch of each size, shape (n,).
        weights: Weight of each squared error, shape (n,); equal by default. Batches of weight 0 are left out.

    Raises:
        MeasurementError: If lengths differ, if a number is not finite or not positive (weights may be 0), or if fewer
            than two distinct batch sizes are left.
    """
    b, t = _column(sizes, "sizes"), _column(seconds, "seconds")
    w = np.ones(len(b)) if weights is None else _column(weights, "weights", zero=True)
    if not len(b) == len(t) == len(w):
        raise MeasurementError(
            f"{len(b)} batch sizes, {len(t)} times and {len(w)} weights were given; expected the same number of each. "
            "Give one time and one weight for each batch size."
        )
    b, t, w = b[w > 0], t[w > 0], w[w > 0]
    if len(np.unique(b)) < 2:
        raise MeasurementError(
            f"A line cannot be fitted through batches of {format_count(len(np.unique(b)), 'size')}; expected at least "
            "two. Measure another size."
        )
    roots = np.sqrt(w / w.max())
    columns = np.stack([b / t, 1 / t], axis=1) * roots[:, None]
    lengths = np.linalg.norm(columns, axis=0)
    columns /= lengths  # their scales may differ by many orders of magnitude
    best = np.linalg.lstsq(columns, roots, rcond=None)[0]
    if best.min() < 0:
        # The function is convex: its minimum within the quadrant is on an edge, where one of the two is 0.
        alone = columns.T @ roots
        best = np.where(np.arange(2) == np.argmax(alone), alone, 0.0)
    alpha_s, beta_s = (best / lengths).tolist()
    return alpha_s, beta_s


def _column(values: ArrayLike, what: str, *, zero: bool = False) -> NDArray[np.float64]:
    """The values as numbers; ``zero``: whether 0 is allowed."""
    column = np.asarray(values, np.float64)
    wrong = column[~(np.isfinite(column) & ((column > 0) | (zero & (column == 0))))]
    if column.ndim != 1 or len(wrong):
        found = f"they contain {wrong[0]:g}" if len(wrong) else f"they have {column.ndim} dimensions"
        raise MeasurementError(
            f"The {what} of measured batches are impossible: {found}; expected a list of finite numbers "
            f"{'of at least 0' if zero else 'above 0'}. Correct them, or measure again."
        )
    return column
