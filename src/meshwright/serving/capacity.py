"""How many devices do these requests need? The fewest with which a policy answers enough of every model's in time.

Found by simulation, from the devices that the staggered equation asks for: their number is doubled until it suffices,
or until some of them never get a batch, then the interval is halved. That one device less does not suffice is
simulated, too. Devices hold all models, or those that a placement gives them (`placement`).
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
from meshwright.serving.simulation.fleet import refuse_scaling
from meshwright.spec import Deployment, Diurnal, ServingError
from meshwright.spec.groups import MOST_DEVICES

# With fewer devices, one may be idle by chance.
_ENOUGH_TO_TELL = 64


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
    more delay and slack than time, for a deployment with groups of its own or scaling, where no request is counted, and
    for less than a period of diurnal arrivals.
    """
    if deployment.groups:
        raise ServingError(
            "The deployment has groups, whose numbers of devices are given. Leave them out, or have them found anew "
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
        raise ServingError("Nothing arrives in this deployment, so that no number of devices is the fewest.")
    devices = min(max(math.ceil(min(staggered, MOST_DEVICES)), least), MOST_DEVICES)
    low = least - 1
    while not suffices(found := attempt(devices)):
        has_idle = devices >= _ENOUGH_TO_TELL and not found.busy_s.all()
        if has_idle or devices == MOST_DEVICES:
            raise ServingError(
                f"{devices} devices do not answer {100 * in_time:g} % of every model's requests in time"
                + (", though some of them never had a batch: more would not help. " if has_idle else ". ")
                + "Give more time (slo), or less delay and slack."
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
    """Devices for the rates as they are simulated; of those that swing for the highest."""
    rates = rates_within(deployment.models, *begin_end, scale)
    needed = []
    for model, rate in zip(deployment.models, rates, strict=True):
        highest = model.arrivals.high * scale if isinstance(model.arrivals, Diurnal) else rate
        needed.append(model.copies * devices_for(model.line, model.slo, highest, equation))
    return math.fsum(needed)
