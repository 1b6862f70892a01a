"""Divide M microbatches among unequal devices such that all of them finish as early as possible.

    minimise  max over devices d of  m_d t_d        over whole m_d >= 1 with  Σ_d m_d = M

It is optimal to give each microbatch in turn to the device that would finish it first. `share_out` does this for groups
of equal devices; it starts from the shares M / Σ 1/t_d, rounded down, to skip most of the turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.spec import PlanError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def optimal_shares(seconds: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """Return the number of microbatches of each device; ``seconds`` are those of one microbatch on each.

    Among equal devices the first ones get more. Raises PlanError for fewer microbatches than devices, or for seconds
    that are not positive.
    """
    if num_microbatches < len(seconds) or not all(0 < item < np.inf for item in seconds):
        raise PlanError(
            f"{num_microbatches} microbatches cannot be divided among {len(seconds)} devices that take {list(seconds)} "
            "s per microbatch; expected at least one microbatch for each device, and positive times."
        )
    times, one_each = np.array(seconds, np.float64), np.ones(len(seconds), np.int64)
    most = np.empty(len(seconds), np.int64)
    surplus = share_out(one_each, times, num_microbatches, most)
    # Only the class that was raised last may have more than it needs: each device is a class of its own here.
    assert surplus == 0
    return tuple(most.tolist())


@compiled
def share_out(counts: Integers, seconds: Floats, num_microbatches: int, most: Integers) -> int:
    """Divide microbatches among ``counts[k]`` devices that take ``seconds[k]`` per microbatch; shapes (kinds,).

    Writes the most microbatches that a device of each kind gets into ``most`` (kinds,). Returns how many devices of the
    kind that was increased last get one less. ``num_microbatches`` must be at least the number of devices.
    """
    num_kinds = len(counts)
    left = num_microbatches
    most[:] = 0
    # Kinds that are so slow that one microbatch each is more than their share stay with one.
    is_slow = counts == 0
    whole = 0.0
    for _ in range(num_kinds):
        speed, free, again = 0.0, num_microbatches, False
        for k in range(num_kinds):
            if is_slow[k]:
                free -= counts[k]
            else:
                speed += counts[k] / seconds[k]
        whole = free / speed if speed > 0.0 else 0.0
        for k in range(num_kinds):
            if not is_slow[k] and seconds[k] > whole:
                is_slow[k] = again = True
        if not again:
            break
    for k in range(num_kinds):
        if counts[k] > 0:
            most[k] = 1 if is_slow[k] else max(1, int(whole / seconds[k] * (1.0 - 1e-12)))
            left -= most[k] * counts[k]
    while left > 0:
        first, end = -1, np.inf
        for k in range(num_kinds):
            if counts[k] > 0 and (most[k] + 1) * seconds[k] < end:
                first, end = k, (most[k] + 1) * seconds[k]
        most[first] += 1
        left -= counts[first]
    return int(-left)
