"""How slow devices are, learnt from the batches that they run: in thousandths of what they are taken to be."""

from __future__ import annotations

from meshwright.cost.compiled import compiled
from meshwright.serving.policies.pool import BEGAN, FREE_AT, NOMINAL, SLOWNESS, TYPICAL, Ints

# No device is taken to be faster than a tenth.
_LEAST = 100
# Steps are such parts of what there is: the quantile at which it falls as often as it rises is 98 %.
_RISE, _FALL = 10, 500


@compiled
def observe(pool: Ints, now: int, device: int) -> None:
    """Learn from a batch that has ended on a device how slow it is.

    ``SLOWNESS`` follows a high quantile of what batches take; ``TYPICAL`` is a mean over the last devices.
    """
    slowness = pool[pool[SLOWNESS] + device]
    expected = pool[pool[FREE_AT] + device] - pool[pool[BEGAN] + device]
    if expected <= 0:
        return
    observed = max((now - pool[pool[BEGAN] + device]) * slowness // expected, _LEAST)
    if observed > slowness:
        slowness = min(slowness + slowness // _RISE, observed)
    else:
        slowness = max(slowness - slowness // _FALL, observed)
    pool[pool[SLOWNESS] + device] = slowness
    pool[TYPICAL] += (slowness - pool[TYPICAL]) // 32


@compiled
def trust(pool: Ints, device: int) -> None:
    """A request was dropped while this device, which is taken to be slow, had nothing to do: it may have recovered."""
    slowness = pool[pool[SLOWNESS] + device]
    pool[pool[SLOWNESS] + device] -= max(slowness - NOMINAL, 0) // 8
    pool[TYPICAL] -= max(pool[TYPICAL] - NOMINAL, 0) // 8


@compiled
def recover(pool: Ints, device: int) -> None:
    """A virtual device has ended a batch: let it seem as much less slow as a real one that is not slow.

    It takes what nearly all batches of the real one stayed below. Were that to stay so, one late batch would count for
    all of a trial.
    """
    slowness = pool[pool[SLOWNESS] + device]
    pool[pool[SLOWNESS] + device] = max(slowness - slowness // _FALL, min(slowness, NOMINAL))
