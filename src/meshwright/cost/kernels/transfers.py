"""How far off a predictor is on a device without rows: by what others know of it, from devices left out.

    sister   the same code was measured on a device of the same compute capability
    near     the same code, on devices of others
    far      only other code, or other arithmetic

Every device is left out alone, and with all of its compute capability. Its residuals, with those of the devices that
went with it, are one sample of how far off such a step is. The interval of a step goes from the 10 % to the 90 %
quantile of its samples, each of the same weight however many rows it has, and is no narrower than that of a smaller
step. A step of which there is no sample has the interval of the next larger one.

Source: conformal prediction for a new group, by pooled distributions (Dunn, Wasserman and Ramdas, JASA 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.cost.prediction import Interval, fit_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.prediction import Floats

Step = Literal["sister", "near", "far"]
STEPS: tuple[Step, ...] = ("sister", "near", "far")

# Points at which the distribution of a sample is read, so that all have the same weight.
_QUANTILES = np.linspace(0.0, 1.0, 201)
# Where no row says how far off a transfer is: as high as that of a roofline (`cost.table.ROOFLINE`), and as low.
UNKNOWN = Interval(low=0.1, high=10.0)


def left_out_sets(capabilities: Mapping[str, float]) -> list[frozenset[str]]:
    """The devices that are left out together, given the compute capability of each; never all of them."""
    alone = [frozenset((device,)) for device in capabilities]
    alike = [
        frozenset(device for device, there in capabilities.items() if there == here)
        for here in sorted(set(capabilities.values()))
    ]
    return [some for some in dict.fromkeys((*alone, *alike)) if len(some) < len(capabilities)]


def fit_transfers(samples: Sequence[tuple[Step, Floats]]) -> dict[Step, Interval]:
    """The interval of every step from ln(measured / predicted) of devices left out, each of shape (rows,)."""
    found: dict[Step, Interval] = {}
    widest = Interval(low=1.0, high=1.0)
    for step in STEPS:
        alike = [np.quantile(rests, _QUANTILES) for one, rests in samples if one == step and len(rests)]
        if alike:
            widest = found[step] = join_intervals(widest, interval_of(np.concatenate(alike)))
    following = UNKNOWN
    for step in reversed(STEPS):
        following = found.setdefault(step, following)
    return found


def join_intervals(here: Interval, there: Interval) -> Interval:
    """The narrowest interval that holds both."""
    return Interval(low=min(here.low, there.low), high=max(here.high, there.high))


def interval_of(rests: Floats) -> Interval:
    """The interval around predictions with these residuals, ln(measured / predicted), shape (rows,), at least one."""
    return fit_interval(np.exp(rests), np.ones(len(rests)))
