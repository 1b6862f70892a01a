"""Scaling: the number of running devices of a deployment follows the arrivals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshwright.spec.bounds import check_bounds
from meshwright.spec.errors import ServingError
from meshwright.spec.latency import LONGEST, NO_TIME
from meshwright.spec.units import Seconds

if TYPE_CHECKING:
    from meshwright.spec.deployment import Deployment

A_SECOND, A_MINUTE = Seconds(1.0), Seconds(60.0)

_check = partial(check_bounds, ServingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Start and release devices as arrivals change, between ``minimum`` and ``maximum`` running devices.

    ``maximum`` None means all devices of the deployment. A run starts with ``minimum`` devices. ``start`` is the time
    to start a device in the simulator; a server's devices take their real time. The number of devices is chosen again
    every ``every``. ``target`` is the share of requests to answer in time: the closer to 1, the more spare devices are
    kept for bursts. Devices are released after fewer devices would have sufficed for the time ``calm``.
    """

    minimum: int = 1
    maximum: int | None = None
    start: Seconds = NO_TIME
    every: Seconds = A_SECOND
    target: float = 0.99
    calm: Seconds = A_MINUTE

    def __post_init__(self) -> None:
        _check("Scaling", target=(0.5, self.target, 0.99999), every=(1e-3, self.every, LONGEST))
        _check("Scaling", start=(0.0, self.start, LONGEST), calm=(0.0, self.calm, LONGEST))


def check_scaling(deployment: Deployment) -> None:
    """Raise ServingError if ``minimum`` or ``maximum`` are out of range, or if the deployment also has groups."""
    scaling = deployment.scaling
    if scaling is None:
        return
    _check("Scaling", maximum=(1, scaling.maximum, deployment.devices))
    _check("Scaling", minimum=(1, scaling.minimum, scaling.maximum or deployment.devices))
    if deployment.groups:
        raise ServingError(
            "The deployment has groups, each of which owns its devices, and scaling, which starts and releases "
            "devices that hold all models. Leave one of the two out."
        )
