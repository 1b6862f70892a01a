"""How slow devices are, learnt from the batches that they run: in thousandths of what they are taken to be."""

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

# No device is taken to be faster than a tenth.
_LEAST = 100
# Steps are such parts of what there is: the quantile at which it falls as often as it rises is 98 %.
_RISE, _FALL = 10, 500
# A batch is far beyond what was planned if it takes longer by such a part of that.
_FAR = 4
# Means are over so many batches; the long one is over more than a late batch is felt for.
_MEMORY, _LONG_MEMORY = 32, 256


@compiled
def observe(pool: Ints, now: int, device: int) -> None:
    """Learn from a batch that has ended on a device how slow it is.

    ``SLOWNESS`` follows a high quantile of what batches take. One far beyond it, after `_MEMORY` that were not, says
    nothing: it is a hiccup, and would be felt for fifty more. ``TYPICAL`` is a mean of it over the last devices,
    ``USUAL`` a long one of each, and ``MEAN`` one of what batches take.
    """
    slowness = pool[pool[SLOWNESS] + device]
    expected = pool[pool[FREE_AT] + device] - pool[pool[BEGAN] + device]
    if expected <= 0:
        return
    observed = max((now - pool[pool[BEGAN] + device]) * slowness // expected, _LEAST)
    # Of a batch that took very long, twice what was planned counts.
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
    """When the batch of a virtual device ends: it takes what those of the real one take in the mean.

    That is less than what is planned, as nearly all batches are to be in time.
    """
    began, slowness = pool[pool[BEGAN] + device], pool[pool[SLOWNESS] + device]
    return began + (pool[pool[FREE_AT] + device] - began) * (pool[pool[MEAN] + device] // PARTS) // slowness


@compiled
def observe_virtual(pool: Ints, now: int, device: int) -> None:
    """A batch has ended on a virtual device, which becomes as slow as it is usually taken to be, in a real one's steps.

    Were it to stay what it was when the device was copied, one late batch just before would count for all that comes.
    """
    slowness = pool[SLOWNESS] + device
    pool[slowness] = _follow(pool[slowness], pool[pool[USUAL] + device] // PARTS)
    pool[pool[FREE_AT] + device] = now


@compiled
def expect_no_faster(pool: Ints, hoped: int) -> None:
    """No device is faster than this, and a request that waited as if one were is lost: others are not to wait so long.

    ``TYPICAL`` follows batches, and where all requests are lost there are none.
    """
    pool[TYPICAL] = max(pool[TYPICAL], hoped)


@compiled
def trust(pool: Ints, now: int, device: int) -> None:
    """A request was dropped while this device, which is taken to be slow, had nothing to do: it may have recovered.

    It is tried only after it was idle for as long as its last batch took, so that a wrong try costs no more than the
    wait did: one that is just free is seen as it is by its batches.
    """
    began, end = pool[pool[BEGAN] + device], pool[pool[FREE_AT] + device]
    if now - end >= end - began:
        pool[pool[SLOWNESS] + device] -= max(pool[pool[SLOWNESS] + device] - NOMINAL, 0) // 8


@compiled
def _follow(slowness: int, observed: int) -> int:
    """What a device is taken to be after a batch, a step towards what that has shown."""
    if observed > slowness:
        return int(min(slowness + slowness // _RISE, observed))
    return int(max(slowness - slowness // _FALL, observed))
