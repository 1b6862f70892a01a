"""The temperature of a Markov chain, from the share of longer steps that it is to accept.

FlexFlow fixes beta = 0.05 to 5 per ms whatever the step takes; that freezes a chain on a model of one second and lets
one on a model of a millisecond run wild. Here proposals drawn at the start, all of them rejected, say by how much
steps rise: d_1 .. d_k. Beta is where the rule accepts the wanted share of them,

    (1 / k) Σ exp(-beta d_i) = share

a sum that falls with beta, so that halving finds it. Rises are smaller near a good strategy than far from it; so beta
goes up by half after a round in which more than twice the share was accepted, down as much after one with less than
half of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Of the proposals that make a step longer. Far more, and chains drift away from what is good; far less, and they stay.
SHARE = 0.02
_STEP = 1.5


def calibrate(rises: NDArray[np.float64], share: float = SHARE) -> float:
    """Beta per unit of ``rises`` (shape (k,), positive); 0 without any."""
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
    """Return beta after a round in which this share of the longer ones was accepted."""
    if num_accepted > 2.0 * share * num_longer:
        return beta * _STEP
    return beta / _STEP if num_accepted < 0.5 * share * num_longer else beta
