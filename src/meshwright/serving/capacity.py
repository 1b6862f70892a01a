"""How many devices do these requests need? The fewest with which a policy answers enough of every model's in time.

Found by simulation, from the devices that the staggered equation asks for: their number is doubled until it suffices,
then the interval is halved. That one device less does not suffice is simulated, too. Devices hold all models, or those
that a placement gives them (`placement`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.serving.arrivals import mean_rate
from meshwright.serving.batching import Equation, devices_for
from meshwright.serving.expansion import expand_deployment
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.simulation import IN_TIME, ServingResult, simulate_deployment
from meshwright.serving.simulation.fleet import refuse_scaling
from meshwright.spec import Deployment, ServingError
from meshwright.spec.groups import MOST_DEVICES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capacity:
    """``devices`` suffice, with ``result``; ``fewer`` is what one device less does, None if that would be none.

    ``staggered`` and ``uncoordinated`` are the devices that the equations ask for, the last one in part.
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
    """The fewest devices that answer this share of each model's requests in time; those of the deployment do not count.

    ``place`` gives groups to a deployment of some devices. Raises ServingError where no number of devices does, as with
    more delay and slack than time, and for a deployment with groups of its own or scaling.
    """
    if deployment.groups:
        raise ServingError(
            "The deployment has groups, whose numbers of devices are given. Leave them out, or have them found anew "
            "for each number of devices: --place best."
        )
    refuse_scaling(deployment)
    deployment = expand_deployment(deployment)
    most = max((trouble.device + 1 for trouble in deployment.troubles), default=1)

    def attempt(devices: int) -> ServingResult:
        changed = replace(deployment, devices=devices)
        if place is not None:
            changed = place(changed)
        return simulate_deployment(changed, policy, seconds, seed=seed, scale=scale, warm_up_s=warm_up_s)

    def suffices(result: ServingResult) -> bool:
        return all(model.in_time_share >= in_time for model in result.models)

    staggered = _needed(deployment, scale, "staggered")
    limit = min(max(64, 16 * math.ceil(staggered)), MOST_DEVICES) if math.isfinite(staggered) else 0
    devices = max(math.ceil(staggered), most) if limit else 0
    low, found = most - 1, None
    while devices <= limit:
        result = attempt(devices)
        if suffices(result):
            found = result
            break
        low, devices = devices, 2 * devices
    if found is None:
        raise ServingError(
            f"{low or limit} devices do not answer {100 * in_time:g} % of every model's requests in time, and "
            f"{staggered:.4g} would if devices took turns. Give more time (slo), or less delay and slack."
        )
    tried: dict[int, ServingResult] = {}
    while devices - low > 1:
        middle = (low + devices) // 2
        tried[middle] = attempt(middle)
        if suffices(tried[middle]):
            devices, found = middle, tried[middle]
        else:
            low = middle
    fewer = tried.get(devices - 1) or (attempt(devices - 1) if devices > most else None)
    return Capacity(
        devices=devices,
        result=found,
        fewer=fewer,
        staggered=staggered,
        uncoordinated=_needed(deployment, scale, "uncoordinated"),
    )


def _needed(deployment: Deployment, scale: float, equation: Equation) -> float:
    return math.fsum(
        model.copies * devices_for(model.line, model.slo, mean_rate(model.arrivals) * scale, equation)
        for model in deployment.models
    )
