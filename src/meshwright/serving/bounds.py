"""By what can the rates of a deployment be multiplied, by equations, such that its devices still serve them?

The rates are those of the time that counts in a simulation (`counted`). Queries divide their time by their rates: with
the split for a scale, the equations allow another scale, whose split is at least as good there. That is repeated until
nothing is gained.
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
    """The highest multiple of all rates as they are in a simulation at a scale; None if nothing arrives in it."""
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
