"""How far the predictor of GPU kernels is from public measurements, on sizes and on devices that it has not seen."""

from __future__ import annotations

import numpy as np

# Of a device that was left out, each draw gives the first 5, 20 and 100 of its shuffled keys. Fixed before the first
# fit; a draw is default_rng([DRAW_SEED, draw]).permutation(sorted keys of the device and dtype).
DRAW_SEED = 20261124
NUM_DRAWS = 5
NUM_GIVEN = (0, 5, 20, 100)


def given_rows(keys: list[str], draw: int, num_given: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows (shape: rows) of a device that was left out a draw gives: those of ``num_given`` keys."""
    distinct = sorted(set(keys))
    order = np.random.default_rng([DRAW_SEED, draw]).permutation(len(distinct))[:num_given]
    given = {distinct[index] for index in order}
    return np.array([key in given for key in keys], np.bool_)
