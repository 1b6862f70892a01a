"""Capacity planning: the fewest devices with which a policy answers enough of every model's requests in time.

The number is found by simulation. The search starts at the number of devices that the staggered equation gives and
doubles it until it suffices, or until some devices never get a batch; then it halves the interval. The result is
confirmed by a simulation with one device fewer. Devices hold all models, or those that a placement assigns to them
(`placement`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.serving.batching import Equation, devices_for
from meshwright.serving.counted import check_counted, counted_time, rates_within, refuse_part_of_wave
from meshwright.serving.expansion import expand_deployment
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.simulation import IN_TIME, ServingResult, simulate_deployment
from meshwright.serving.simulation.fleet_series import refuse_scaling
from meshwright.spec import Deployment, Diurnal, ServingError
from meshwright.spec.groups import MOST_DEVICES

# With fewer devices than this, one may be idle by chance.
_ENOUGH_TO_TELL = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capacity:
    """The fewest ``devices`` that suffice, with the ``result`` of their simulation.

    ``fewer`` is the result with one device fewer, None if the deployment cannot have fewer. ``staggered`` and
    ``uncoordinated`` are the fractional numbers of devices by these equations of `batching`.
    """

    devices: int
    result: ServingResult
    fewer: ServingResult | None
    staggered: float
    uncoordinated: float


def find_capacity(
    deployment: Deployment,
    policy: Policy,
    seconds: float,
    *,
    seed: int = 0,
    scale: float = 1.0,
    in_time: float = IN_TIME,
    warm_up_s: float = 1.0,
    place: Callable[[Deployment], Deployment] | None = None,
) -> Capacity:
    """Return the fewest devices with which each model answers at least a share ``in_time`` of its requests in time.

    ``seconds`` are simulated for each number of devices, after ``warm_up_s``; ``scale`` multiplies all rates. The
    deployment's own number of devices is ignored. ``place`` assigns groups to a deployment with a given number of
    devices. Raises ServingError if no number of devices suffices (for example because delay and slack exceed the SLO),
    if the deployment has groups or scaling, if no request is counted, and for less than one period of diurnal arrivals.
    """
    if deployment.groups:
        raise ServingError(
            "The deployment has groups, so its number of devices is fixed. Remove the groups, or let them be found "
            "for each number of devices: --place best."
        )
    refuse_scaling(deployment)
    deployment = expand_deployment(deployment, scale)
    refuse_part_of_wave(deployment.models, seconds)
    begin_end = counted_time(deployment.models, seconds, warm_up_s, scale)
    least = max((trouble.device + 1 for trouble in deployment.troubles), default=1)

    def attempt(devices: int) -> ServingResult:
        changed = replace(deployment, devices=devices)
        if place is not None:
            changed = place(changed)
        result = simulate_deployment(changed, policy, seconds, seed=seed, scale=scale, warm_up_s=warm_up_s)
        check_counted(result.num_requests, deployment.models, seconds, warm_up_s, scale)
        return result

    def suffices(result: ServingResult) -> bool:
        return all(model.in_time_share >= in_time for model in result.models)

    staggered = _needed(deployment, begin_end, scale, "staggered")
    if not staggered:
        check_counted(0, deployment.models, seconds, warm_up_s, scale)
        raise ServingError("No requests arrive in this deployment, so there is no fewest number of devices.")
    devices = min(max(math.ceil(min(staggered, MOST_DEVICES)), least), MOST_DEVICES)
    low = least - 1
    while not suffices(found := attempt(devices)):
        has_idle = devices >= _ENOUGH_TO_TELL and not found.busy_s.all()
        if has_idle or devices == MOST_DEVICES:
            raise ServingError(
                f"{devices} devices do not answer {100 * in_time:g} % of every model's requests in time"
                + (", though some of them never got a batch: more devices would not help. " if has_idle else ". ")
                + "Increase the SLO (slo), or reduce delay and slack."
            )
        low, devices = devices, min(2 * devices, MOST_DEVICES)
    tried: dict[int, ServingResult] = {}
    while devices - low > 1:
        middle = (low + devices) // 2
        tried[middle] = attempt(middle)
        if suffices(tried[middle]):
            devices, found = middle, tried[middle]
        else:
            low = middle
    fewer = tried.get(devices - 1) or (attempt(devices - 1) if devices > least else None)
    return Capacity(
        devices=devices,
        result=found,
        fewer=fewer,
        staggered=staggered,
        uncoordinated=_needed(deployment, begin_end, scale, "uncoordinated"),
    )


def _needed(deployment: Deployment, begin_end: tuple[float, float], scale: float, equation: Equation) -> float:
    """Devices by an equation for the simulated rates; for diurnal arrivals, for the highest rate."""
    rates = rates_within(deployment.models, *begin_end, scale)
    needed = []
    for model, rate in zip(deployment.models, rates, strict=True):
        highest = model.arrivals.high * scale if isinstance(model.arrivals, Diurnal) else rate
        needed.append(model.copies * devices_for(model.line, model.slo, highest, equation))
    return math.fsum(needed)
