"""The error of a predictor on a device without rows, by the similarity of measured devices, from held-out devices.

    sister   the same code was measured on a device of the same compute capability
    near     the same code, on devices of others
    far      only other code, or other arithmetic

Every device is held out alone, and with all of its compute capability. Its residuals, with those of the devices held
out with it, are one sample of the error of such a step. The interval of a step goes from the 10 % to the 90 % quantile
of its samples, which have equal weights whatever their numbers of rows, and is at least as wide as that of a smaller
step. A step without samples has the interval of the next larger one.

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

# Points at which the distribution of a sample is read, so that all samples have the same weight.
_QUANTILES = np.linspace(0.0, 1.0, 201)
# The interval of a transfer without any rows: about as wide as that of a roofline (`cost.table.ROOFLINE`), in both
# directions.
UNKNOWN = Interval(low=0.1, high=10.0)


def left_out_sets(capabilities: Mapping[str, float]) -> list[frozenset[str]]:
    """Return the sets of devices that are held out together; never all devices.

    ``capabilities`` has the compute capability of each device.
    """
    alone = [frozenset((device,)) for device in capabilities]
    alike = [
        frozenset(device for device, there in capabilities.items() if there == here)
        for here in sorted(set(capabilities.values()))
    ]
    return [some for some in dict.fromkeys((*alone, *alike)) if len(some) < len(capabilities)]


def fit_transfers(samples: Sequence[tuple[Step, Floats]]) -> dict[Step, Interval]:
    """Return the interval of every step from ln(measured / predicted) of held-out devices, each of shape (rows,)."""
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
    """Return the narrowest interval that contains both."""
    return Interval(low=min(here.low, there.low), high=max(here.high, there.high))


def interval_of(rests: Floats) -> Interval:
    """Return the interval around predictions with residuals ln(measured / predicted), shape (rows,), at least one."""
    return fit_interval(np.exp(rests), np.ones(len(rests)))
