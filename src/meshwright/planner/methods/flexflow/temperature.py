"""The inverse temperature beta of a Markov chain: set (`calibrate`) so that a wanted share of slower proposals passes.

FlexFlow fixes beta at 0.05 to 5 per ms, however long a step takes. This freezes a chain on a model whose step takes a
second, and makes it nearly random on one whose step takes a millisecond. Here, proposals are drawn at the start and all
rejected; d_1 .. d_k are the increases of the step time by the slower ones. Beta is the value at which the wanted share
of these would be accepted,

    (1 / k) Σ exp(-beta d_i) = share

The sum falls with beta, so it is solved by bisection. Near a good strategy increases are smaller than far from it. So
beta is multiplied by 1.5 after a round that accepted more than twice the share, and divided by 1.5 after one that
accepted less than half of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Share of the proposals with a longer step that are accepted. With far more, chains leave good strategies; with far
# less, they do not move.
SHARE = 0.02
_STEP = 1.5


def calibrate(rises: NDArray[np.float64], share: float = SHARE) -> float:
    """Return beta, per unit of ``rises``: the increases of the step time by slower proposals, shape (k,), positive.

    Returns 0 if there are no increases.
    """
    if not len(rises):
        return 0.0
    low, high = 0.0, 1.0 / float(rises.min())
    while np.exp(-high * rises).mean() > share:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if np.exp(-middle * rises).mean() > share else (low, middle)
    return (low + high) / 2.0


def adjust(beta: float, num_accepted: int, num_longer: int, share: float = SHARE) -> float:
    """Return beta for the next round, after one that accepted ``num_accepted`` of ``num_longer`` slower proposals."""
    if num_accepted > 2.0 * share * num_longer:
        return beta * _STEP
    return beta / _STEP if num_accepted < 0.5 * share * num_longer else beta
