"""The highest multiple of a deployment's rates that its devices can serve, by the equations of batching.

The rates are those of the counted time of a simulation (`counted`). Queries divide their time according to their rates:
with the split for one scale, the equations allow another scale, for which its own split is at least as good. This is
repeated until the bound no longer changes.
"""

from __future__ import annotations

from meshwright.serving.batching import Equation, bound_scale
from meshwright.serving.counted import counted_time, rates_within
from meshwright.serving.expansion import expand_deployment
from meshwright.spec import Deployment

_MOST_SPLITS = 20
_SAME = 1e-6


def scale_bound(
    deployment: Deployment,
    seconds: float,
    *,
    scale: float = 1.0,
    warm_up_s: float = 0.0,
    equation: Equation = "staggered",
) -> float | None:
    """Return the highest multiple of all rates of a simulation at a scale; None if no requests arrive in it."""
    split, bound = scale, 0.0
    for _ in range(_MOST_SPLITS):
        models = expand_deployment(deployment, split).models
        rates = rates_within(models, *counted_time(models, seconds, warm_up_s, scale), scale)
        if not any(rates):
            return None
        bound = bound_scale(models, rates, deployment.devices, equation)
        if not deployment.queries or abs(scale * bound - split) <= split * _SAME:
            return bound
        split = scale * bound
    return bound
