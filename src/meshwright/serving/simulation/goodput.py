"""Goodput (`find_goodput`): the highest rates at which a policy answers a given share of requests in time; its bound.

`compare_policies` computes each policy's **regret**: the share of answers in time that it loses against the best other
policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.serving.arrivals import mean_rate
from meshwright.serving.batching import Equation, bound_scale
from meshwright.serving.counted import check_counted, counted_time, rates_within, refuse_part_of_wave
from meshwright.serving.expansion import expand_deployment
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.simulation.fleet_series import refuse_scaling
from meshwright.serving.simulation.simulate_serving import ServingResult, simulate_deployment
from meshwright.spec import Deployment, ServingError

_MOST_SPLITS = 20
_SAME = 1e-6


# By the equations of batching. The rates are those of the counted time of a simulation (`counted`). Queries divide
# their time according to their rates: with the split for one scale, the equations allow another scale, for which its
# own split is at least as good. This is repeated until the bound no longer changes.
def scale_bound(
    deployment: Deployment,
    seconds: float,
    *,
    scale: float = 1.0,
    warm_up_s: float = 0.0,
    equation: Equation = "staggered",
) -> float | None:
    """Return the highest factor on ``scale`` times all rates that the devices can serve by an equation of `batching`.

    Returns None if no requests arrive in the counted time.
    """
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


# Default share of requests in time for goodput (as in the papers).
IN_TIME = 0.99


def find_goodput(
    deployment: Deployment,
    policy: Policy,
    seconds: float,
    *,
    seed: int = 0,
    in_time: float = IN_TIME,
    tolerance: float = 0.002,
    warm_up_s: float = 1.0,
) -> tuple[float, ServingResult]:
    """Return the highest factor on all rates at which a share ``in_time`` of requests is in time, and its result.

    The factor is found by bisection between 0 and twice the staggered bound, to a relative ``tolerance``; it is 0 if
    even ``tolerance`` times this interval is too high. Raises ServingError if no requests arrive, if no request is
    counted at any factor, for a deployment with scaling, and for less than a period of diurnal arrivals.
    """
    refuse_scaling(deployment)
    models = expand_deployment(deployment).models
    refuse_part_of_wave(models, seconds)
    rates = [mean_rate(model.arrivals) for model in models]
    if not any(rates):
        raise ServingError("No requests arrive in this deployment, so its rates have no highest multiple.")
    # At other scales, other parts of a trace are simulated.
    bound = scale_bound(deployment, seconds, warm_up_s=warm_up_s)
    if bound is None:
        check_counted(0, models, seconds, warm_up_s)
    low, high = 0.0, 2.0 * max(bound or 0.0, bound_scale(models, rates, deployment.devices))
    best, least, num_counted = None, tolerance * high, 0
    while best is None or high - low > tolerance * high:
        middle = (low + high) / 2
        result = simulate_deployment(deployment, policy, seconds, seed=seed, scale=middle, warm_up_s=warm_up_s)
        num_counted += result.num_requests
        if result.num_requests and result.in_time_share >= in_time:
            low, best = middle, result
        else:
            high = middle
        if best is None and high < least:
            break
    check_counted(num_counted, models, seconds, warm_up_s)
    if best is None:
        return 0.0, simulate_deployment(deployment, policy, seconds, seed=seed, scale=0.0, warm_up_s=warm_up_s)
    return low, best


def compare_policies(
    deployment: Deployment, policies: Mapping[str, Policy], seconds: float, **options: Any
) -> tuple[dict[str, ServingResult], list[dict[str, Any]]]:
    """Simulate a deployment under several policies; return the results by name, and a row of figures for each.

    ``regret_share`` in a row is the share of goodput that the policy loses against the best other policy, 0 for the
    best. ``ahead_share`` is the share by which the best policy exceeds the best other policy, 0 for the others.
    ``options`` are those of `simulate_deployment`.
    """
    results = {name: simulate_deployment(deployment, policy, seconds, **options) for name, policy in policies.items()}
    rows = []
    for name, result in results.items():
        others = [other.goodput_per_s for key, other in results.items() if key != name]
        ratio = result.goodput_per_s / max(others) if others and max(others) > 0 else 1.0
        rows.append(
            {"policy": name, **result.row(), "regret_share": max(1 - ratio, 0.0), "ahead_share": max(ratio - 1, 0.0)}
        )
    return results, rows
