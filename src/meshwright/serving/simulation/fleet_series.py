"""The simulated devices of a deployment that scales: starting, up, draining, released or failed; and their use.

To start a device takes the time ``START``; the first device that is down, not failed and no longer busy is started. A
released device first finishes its batches. A device that fails while it starts, or that returns from a failure, must be
started again. Without scaling the fleet is off, and all devices are up except failed ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.serving.policies.autoscaling import WANTED, allocate_scaler, wanted_devices
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.policies.nexus import Nexus
from meshwright.serving.policies.pool import DEVICE, DOWN, NEVER, NUM_DEVICES, NUM_UP, Ints
from meshwright.spec import Deployment, ServingError

# Numbers: the next moment of an event here; whether the fleet scales; time between two decisions, and the next
# decision; time of a start; devices that are starting, and starts so far; devices at the start; ns of each point.
NEXT, IS_ON, EVERY, DECISION_AT, START, NUM_STARTING, NUM_STARTS, AT_FIRST, POINT = range(9)
# Rows, with a column for each device: when it will be ready; whether it failed; since when it is held, and up, or -1;
# how long in all.
READY_AT, FAILED, HELD_SINCE, HELD, UP_SINCE, UP = range(6)
# Most points of a series.
POINTS = 4096
_NS = 1e9


class FleetSeries(NamedTuple):
    """The state of a fleet, in arrays.

    ``numbers``: single figures, such as the time of the next decision, at the indices `NEXT` to `POINT`. ``table``:
    rows `READY_AT` to `UP`, a column for each device. ``scaler``: the state of the scaling policy (`autoscaling`).
    ``series``: rows of time (ns; -1: unused row), and devices that are up, starting and wanted.
    """

    numbers: Ints
    table: Ints
    series: Ints
    scaler: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaled:
    """The use of devices by a deployment that scales.

    ``device_s`` is the sum over all devices of the seconds from a start until the end of the last batch.
    ``mean_devices`` is the mean number of devices that are up, ``num_starts`` the number of starts. ``series`` has a
    row whenever a number changed, at most 4,096: seconds, and devices that are up, starting and wanted.
    """

    device_s: float
    mean_devices: float
    num_starts: int
    series: NDArray[np.float64] = field(repr=False)

    def points(self) -> list[dict[str, float]]:
        """Return the rows of the series as dictionaries: ``at_s``, ``num_up``, ``num_starting``, ``num_wanted``."""
        names = ("at_s", "num_up", "num_starting", "num_wanted")
        return [dict(zip(names, (at, *map(int, counts)), strict=True)) for at, *counts in self.series.tolist()]

    def row(self) -> dict[str, float]:
        """Return the figures as a part of a table's row."""
        return {"device_s": self.device_s, "mean_devices": self.mean_devices, "num_starts": self.num_starts}


def make_fleet(deployment: Deployment, policy: Policy, num_models: int, span_ns: int) -> FleetSeries:
    """Return the fleet of a deployment at the start of a simulation; ``span_ns`` is the time that its series covers.

    Raises ServingError for a policy that plans for a fixed number of devices.
    """
    scaling, num_devices = deployment.scaling, deployment.devices
    numbers, table = np.zeros(9, np.int64), np.zeros((6, num_devices), np.int64)
    if scaling is None:
        numbers[NEXT], numbers[AT_FIRST] = NEVER, num_devices
        return FleetSeries(numbers, table, np.zeros((0, 4), np.int64), np.zeros(0, np.int64))
    if isinstance(policy, Nexus):
        raise ServingError(
            "Policy nexus plans for all devices one epoch ahead, and does not support scaling. Remove scaling from the "
            "deployment, or choose another policy."
        )
    every, point = round(scaling.every * _NS), span_ns // POINTS + 1
    numbers[[NEXT, DECISION_AT, EVERY]] = every
    numbers[[IS_ON, START, AT_FIRST, POINT]] = 1, round(scaling.start * _NS), scaling.minimum, point
    table[READY_AT] = NEVER
    table[[HELD_SINCE, UP_SINCE]] = np.where(np.arange(num_devices) < scaling.minimum, 0, -1)
    series = np.full((POINTS, 4), -1, np.int64)
    series[0] = 0, scaling.minimum, 0, scaling.minimum
    scaler = allocate_scaler(
        num_models,
        minimum=scaling.minimum,
        maximum=scaling.maximum or num_devices,
        calm_ns=round(scaling.calm * _NS),
        target=scaling.target,
    )
    return FleetSeries(numbers, table, series, scaler)


def refuse_scaling(deployment: Deployment) -> None:
    """Raise ServingError if a deployment scales its devices; for commands that need a fixed number of devices."""
    if deployment.scaling is not None:
        raise ServingError(
            "The deployment scales its devices with the load, but this command needs a fixed number of devices. Remove "
            "the scaling."
        )


def what_was_taken(fleet: FleetSeries, end: int) -> Scaled | None:
    """Return the use of devices by a fleet until ``end`` (ns); None without scaling."""
    if not fleet.numbers[IS_ON]:
        return None
    table = fleet.table
    held, up = (
        table[row].sum() + np.maximum(end - table[since], 0)[table[since] >= 0].sum()
        for row, since in ((HELD, HELD_SINCE), (UP, UP_SINCE))
    )
    series = fleet.series[fleet.series[:, 0] >= 0]
    is_change = np.ones(len(series), bool)
    is_change[1:] = (series[1:, 1:] != series[:-1, 1:]).any(axis=1)
    points = series[is_change].astype(np.float64)
    points[:, 0] /= _NS
    return Scaled(
        device_s=float(held / _NS),
        mean_devices=float(up / end) if end else float(fleet.numbers[AT_FIRST]),
        num_starts=int(fleet.numbers[NUM_STARTS]),
        series=points,
    )


@compiled
def decide_on_devices(fleet: FleetSeries, pool: Ints, now: int) -> int:
    """Decide how many devices are wanted; start devices or cancel starts; return how many devices must be drained."""
    numbers, table = fleet.numbers, fleet.table
    numbers[DECISION_AT] = now + numbers[EVERY]
    wanted = wanted_devices(fleet.scaler, pool, now)
    device = 0
    while device < pool[NUM_DEVICES] and pool[NUM_UP] + numbers[NUM_STARTING] < wanted:
        if _can_start(fleet, pool, device):
            table[READY_AT, device] = now + numbers[START]
            table[HELD_SINCE, device] = now
            numbers[NUM_STARTING] += 1
            numbers[NUM_STARTS] += 1
        device += 1
    device = pool[NUM_DEVICES] - 1
    while device >= 0 and numbers[NUM_STARTING] > 0 and pool[NUM_UP] + numbers[NUM_STARTING] > wanted:
        if table[READY_AT, device] < NEVER:
            table[READY_AT, device] = NEVER
            numbers[NUM_STARTING] -= 1
            release(fleet, device, now)
        device -= 1
    return int(max(pool[NUM_UP] - wanted, 0))


@compiled
def take_ready(fleet: FleetSeries, now: int) -> int:
    """Mark a device whose start is over as up and return it; -1 if no start is over."""
    for device in range(fleet.table.shape[1]):
        if fleet.table[READY_AT, device] <= now:
            fleet.table[READY_AT, device] = NEVER
            fleet.table[UP_SINCE, device] = now
            fleet.numbers[NUM_STARTING] -= 1
            return device
    return -1


@compiled
def leave(fleet: FleetSeries, device: int, is_at_work: bool, now: int) -> None:
    """Take a device out of service; while ``is_at_work``, it is still held until its batches have ended."""
    if fleet.table[UP_SINCE, device] >= 0:
        fleet.table[UP, device] += now - fleet.table[UP_SINCE, device]
        fleet.table[UP_SINCE, device] = -1
    if not is_at_work:
        release(fleet, device, now)


@compiled
def release(fleet: FleetSeries, device: int, now: int) -> None:
    """End the time for which a device is held."""
    if fleet.table[HELD_SINCE, device] >= 0:
        fleet.table[HELD, device] += now - fleet.table[HELD_SINCE, device]
        fleet.table[HELD_SINCE, device] = -1


@compiled
def fail_device(fleet: FleetSeries, device: int, now: int) -> None:
    """Mark a device as failed, whether it was up, draining or starting."""
    fleet.table[FAILED, device] = 1
    if fleet.table[READY_AT, device] < NEVER:
        fleet.table[READY_AT, device] = NEVER
        fleet.numbers[NUM_STARTING] -= 1
    leave(fleet, device, False, now)


@compiled
def note_devices(fleet: FleetSeries, pool: Ints, now: int) -> None:
    """Add a point to the series after a change, and find the time of the next event of the fleet."""
    row = fleet.series[min(now // fleet.numbers[POINT], POINTS - 1)]
    row[0], row[1], row[2] = now, pool[NUM_UP], fleet.numbers[NUM_STARTING]
    row[3] = fleet.scaler[WANTED]
    fleet.numbers[NEXT] = min(fleet.numbers[DECISION_AT], fleet.table[READY_AT].min())


@compiled
def can_help(fleet: FleetSeries, pool: Ints) -> bool:
    """Return whether a device is starting or can be started, for requests that wait while no other event is left."""
    if fleet.numbers[IS_ON] == 0 or pool[NUM_UP] > 0:
        return bool(fleet.numbers[NUM_STARTING] > 0)
    for device in range(pool[NUM_DEVICES]):
        if _can_start(fleet, pool, device):
            return True
    return bool(fleet.numbers[NUM_STARTING] > 0)


@compiled
def _can_start(fleet: FleetSeries, pool: Ints, device: int) -> bool:
    is_down = pool[pool[DEVICE] + device] == DOWN
    return bool(is_down and fleet.table[FAILED, device] == 0 and fleet.table[HELD_SINCE, device] < 0)
