"""The peak of a step of one stage, from the memory that its computations add: one formula for one stage and for all.

With at most k of n microbatches in flight, each keeping a, gradients g that accumulate outside of buckets, and
`Phase.most` of each computation,

    forward                (k - 1)·a + F        + g if a backward came before it (n > k)
    first of n backwards   k·a + B
    a later one            k·a + g + B          k - 1 if all are in flight at once (n = k)
    optimizer              g + O

the largest of them is in use in addition to static memory. Transfers in flight are added separately.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled

# Indices of the computations in a row of bytes.
FORWARD, BACKWARD_FIRST, BACKWARD_LATER, STEP = range(4)
NUM_MOMENTS = 4


@compiled
def fullest(
    most: NDArray[np.float64], each: float, gradients: float, num_in_flight: int, num_microbatches: int
) -> float:
    """Return the bytes at the peak; ``most`` (4,) by computation."""
    goes_on = num_microbatches > num_in_flight
    peak = max(
        (num_in_flight - 1) * each + most[FORWARD] + (gradients if goes_on else 0.0),
        num_in_flight * each + most[BACKWARD_FIRST],
        gradients + most[STEP],
    )
    if num_microbatches > 1:
        held = num_in_flight if goes_on else num_in_flight - 1
        peak = max(peak, held * each + gradients + most[BACKWARD_LATER])
    return float(peak)
