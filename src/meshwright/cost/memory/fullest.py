"""The fullest moment of a step of one stage, from what its computations add: one formula for one stage and for all.

With k of n microbatches in flight at most, each keeping a, gradients g, and `Phase.most` of each computation,

    forward                (k - 1)·a + F        + g if a backward came before it (n > k)
    first of n backwards   k·a + B              its own kind where n = 1
    one in the middle      k·a + g + B          k - 1 where all are in flight at once (n = k)
    last                   a + g + B
    optimizer              g + O                without g where the gradients lie in buckets by then

the largest of them is in use beside what is there all the time. Bytes of transfers under way come on top.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled

# Places of the computations in a row of bytes.
FORWARD, BACKWARD_FIRST, BACKWARD_MIDDLE, BACKWARD_LAST, BACKWARD_ONLY, STEP = range(6)
NUM_MOMENTS = 6


@compiled
def fullest(
    most: NDArray[np.float64], each: float, gradients: float, left: float, num_in_flight: int, num_microbatches: int
) -> float:
    """Bytes at the fullest moment; ``most`` (6,) by computation, ``left`` the gradients that the optimizer finds."""
    gathered = gradients if num_microbatches > num_in_flight else 0.0
    peak = max((num_in_flight - 1) * each + most[FORWARD] + gathered, left + most[STEP])
    if num_microbatches == 1:
        return float(max(peak, each + most[BACKWARD_ONLY]))
    peak = max(peak, num_in_flight * each + most[BACKWARD_FIRST])
    if num_microbatches > 2:
        held = num_in_flight if num_microbatches > num_in_flight else num_in_flight - 1
        peak = max(peak, held * each + gradients + most[BACKWARD_MIDDLE])
    return float(max(peak, each + gradients + most[BACKWARD_LAST]))
