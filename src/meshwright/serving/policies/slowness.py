"""How slow devices are, learnt from their batches, in thousandths of the modelled latency."""

from __future__ import annotations

from meshwright.compiled import compiled
from meshwright.serving.policies.pool import (
    BEGAN,
    FREE_AT,
    MEAN,
    NOMINAL,
    PARTS,
    SLOWNESS,
    STEADY,
    TYPICAL,
    USUAL,
    Ints,
)

# A slowness is at least a tenth of the modelled latency.
_LEAST = 100
# Steps are these fractions of the slowness: it rises as often as it falls at the 98 % quantile.
_RISE, _FALL = 10, 500
# A batch is far beyond the plan if it takes longer by this fraction.
_FAR = 4
# Batches that means are over; the long one outlasts the effect of a late batch.
_MEMORY, _LONG_MEMORY = 32, 256


@compiled
def observe(pool: Ints, now: int, device: int) -> None:
    """Learn a device's slowness from a batch that has ended.

    ``SLOWNESS`` follows a high quantile of batch times. A batch far beyond it, after `_MEMORY` that were not, is
    ignored: it is a hiccup, and its effect would last for fifty more. ``TYPICAL`` is the mean of slowness over recent
    batches of all devices, ``USUAL`` a long mean for each device, and ``MEAN`` one of batch times.
    """
    slowness = pool[pool[SLOWNESS] + device]
    expected = pool[pool[FREE_AT] + device] - pool[pool[BEGAN] + device]
    if expected <= 0:
        return
    observed = max((now - pool[pool[BEGAN] + device]) * slowness // expected, _LEAST)
    # A batch that took very long counts as twice its plan at most.
    pool[pool[MEAN] + device] += (PARTS * min(observed, 2 * slowness) - pool[pool[MEAN] + device]) // _MEMORY
    is_far, steady = observed > slowness + slowness // _FAR, pool[pool[STEADY] + device]
    pool[pool[STEADY] + device] = 0 if is_far else steady + 1
    if not is_far or steady < _MEMORY:
        slowness = _follow(slowness, observed)
    pool[pool[SLOWNESS] + device] = slowness
    pool[pool[FREE_AT] + device] = now
    pool[TYPICAL] += (slowness - pool[TYPICAL]) // _MEMORY
    pool[pool[USUAL] + device] += (PARTS * slowness - pool[pool[USUAL] + device]) // _LONG_MEMORY


@compiled
def virtual_end(pool: Ints, device: int) -> int:
    """Return when the batch of a virtual device ends: it takes the mean time of the real device's batches.

    That is less than planned, as nearly all batches should be in time.
    """
    began, slowness = pool[pool[BEGAN] + device], pool[pool[SLOWNESS] + device]
    return began + (pool[pool[FREE_AT] + device] - began) * (pool[pool[MEAN] + device] // PARTS) // slowness


@compiled
def observe_virtual(pool: Ints, now: int, device: int) -> None:
    """End a batch on a virtual device, and move its slowness towards the real device's usual one.

    If it kept its value from the copy, one late batch just before would affect the whole trial.
    """
    slowness = pool[SLOWNESS] + device
    pool[slowness] = _follow(pool[slowness], pool[pool[USUAL] + device] // PARTS)
    pool[pool[FREE_AT] + device] = now


@compiled
def expect_no_faster(pool: Ints, hoped: int) -> None:
    """Raise ``TYPICAL`` to the slowness of the fastest device: requests must not wait as if a faster one existed.

    ``TYPICAL`` follows batches only, and where all requests are lost there are no batches.
    """
    pool[TYPICAL] = max(pool[TYPICAL], hoped)


@compiled
def trust(pool: Ints, now: int, device: int) -> None:
    """Lower the slowness of an idle device after a request was dropped because of it: it may have recovered.

    It is tried only after it was idle for the time of its last batch, so that a wrong try costs no more time than the
    wait did; a device that is just free is measured by its batches.
    """
    began, end = pool[pool[BEGAN] + device], pool[pool[FREE_AT] + device]
    if now - end >= end - began:
        pool[pool[SLOWNESS] + device] -= max(pool[pool[SLOWNESS] + device] - NOMINAL, 0) // 8


@compiled
def _follow(slowness: int, observed: int) -> int:
    """Return the slowness after a batch: one step towards the observed value."""
    if observed > slowness:
        return int(min(slowness + slowness // _RISE, observed))
    return int(max(slowness - slowness // _FALL, observed))
