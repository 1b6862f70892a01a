"""The event loop of the simulator: requests, devices and a policy on a virtual clock, compiled as one function.

Events are processed in the order of their times. At equal times, batches end first; then devices fail or return; then
started devices come up and the number of devices is decided (`fleet_series`); then the policy is woken; then requests
arrive. Numba compiles the loop together with the policy's functions; `simulate_plainly` is the same source uncompiled,
for a policy of plain Python.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled, uncompiled
from meshwright.serving.policies.autoscaling import device_to_drain, note_arrival
from meshwright.serving.policies.hooks import arrive, free, next_wake, wake
from meshwright.serving.policies.pool import (
    CHOSEN,
    DECISION,
    DEVICE,
    DOWN,
    DROP,
    LOAD,
    MODEL,
    NEVER,
    NUM_DECISIONS,
    NUM_DEVICES,
    NUM_QUEUED,
    REASONS,
    ROW,
    RUN,
    SLO,
    WIDTH,
    Ints,
)
from meshwright.serving.policies.queues import (
    begin_waiting,
    clear,
    come_up,
    first_of,
    go_down,
    is_in,
    lay_heap,
    least_of,
    put,
    take_out,
)
from meshwright.serving.policies.residency import Weights
from meshwright.serving.simulation.fleet_series import (
    AT_FIRST,
    FAILED,
    IS_ON,
    NEXT,
    FleetSeries,
    can_help,
    decide_on_devices,
    fail_device,
    leave,
    note_devices,
    release,
    take_ready,
)
from meshwright.serving.simulation.weights import check_there, empty_memory, move_weights

# What happens once per batch passes a dozen arrays on; as a separate call it takes a third of the loop's time for
# reference counting (own measurement, 2026-11-23).
inlined = numba.njit(inline="always")

# Columns of an outcome's counts, by model.
NUM_ARRIVED, NUM_IN_TIME, NUM_TOO_LATE, NUM_BATCHES, NUM_LOST, NUM_DROPPED = range(6)
NUM_COUNTS = NUM_DROPPED + len(REASONS)

# Bins of a latency histogram: PLACES per SLO, for SLOS SLOs; longer latencies count in the last bin.
PLACES, SLOS = 1024, 4
# Upper limit of a batch's time (ns): later moments still fit into int64 and come before NEVER.
_LONGEST = 2.0**60


class ServingRun(NamedTuple):
    """The outcome of a simulation.

    ``counts`` and latency ``histogram`` by model; ``busy`` time (ns) and number of ``loads`` by device; number of
    ``batches`` by size.
    """

    counts: Ints
    histogram: NDArray[np.int32]
    busy: Ints
    loads: Ints
    batches: Ints


class Truth(NamedTuple):
    """The true behaviour of devices, which may differ from what the policy expects.

    ``latency`` is as in a pool. A batch's time is divided by the device's ``speed``, and multiplied by a lognormal
    factor of mean 1 and deviation ``jitter``. Device ``change_device[i]`` fails (``change_up[i]`` is 0) or returns at
    ``change_at[i]`` (ns, ascending); the last time is `NEVER`, so that a next one always exists. Requests before
    ``counted_from`` (ns) are not counted. ``weights`` is empty if devices hold all models.
    """

    latency: Ints
    speed: NDArray[np.float64]
    jitter: float
    change_at: Ints
    change_device: Ints
    change_up: Ints
    counted_from: int
    weights: Weights


class DeviceBehaviour(NamedTuple):
    """The state of the simulated devices.

    ``ends`` is a heap of the busy devices by the end of their batch. ``work`` has rows (model, count, begin): the batch
    of each device, and in the second half its next batch; ``requests`` has their requests. (The model is stored, as a
    policy may use the queue for another model before the batch ends.) ``there_at`` is when a device will hold each
    model, and ``memory`` its used memory, if devices do not hold all models (`weights`). ``lost`` are requests that
    were lost and not yet resubmitted: number of resubmitted requests, number of lost requests, and a ring of
    (model, request).
    """

    ends: Ints
    work: Ints
    requests: Ints
    there_at: Ints
    memory: Ints
    lost: Ints


@compiled
def simulate_events(  # noqa: C901 - one loop; what it calls would count references to all arrays
    policy: Any,
    pool: Ints,
    truth: Truth,
    arrival: Ints,
    queue: NDArray[np.int32],
    outcome: ServingRun,
    fleet: FleetSeries,
    seed: int,
) -> int:
    """Simulate all requests under a policy; return the time of the last event (ns). Results are added to ``outcome``.

    Request i arrives at ``arrival[i]`` (ns, ascending) for ``queue[i]``; its deadline is one SLO of its model later.
    """
    np.random.seed(seed)  # numba's own generator, of this thread  # noqa: NPY002
    num_devices, num_requests = pool[NUM_DEVICES], len(arrival)
    slots = (2 * num_devices, pool[ROW])
    devices = DeviceBehaviour(
        np.zeros(4 + 3 * num_devices, np.int64),
        np.zeros((slots[0], 3), np.int64),
        np.zeros(slots, np.int64),
        np.full((num_devices if len(truth.weights.load) > 0 else 0, len(truth.weights.load)), NEVER, np.int64),
        np.zeros((num_devices, 2), np.int64),
        np.zeros(2 + 2 * min(slots[0] * slots[1], num_requests + 1), np.int64),
    )
    lay_heap(devices.ends, 0, num_devices)
    now, at, change = 0, 0, 0
    for device in range(fleet.numbers[AT_FIRST]):
        come_up(pool, device, 0)
        free(policy, pool, 0, device)
    while True:
        # Each call of a policy's function is compiled again for each policy, so all events share one call.
        number, request, deadline, freed = -1, -1, NEVER, -1
        if devices.lost[0] != devices.lost[1]:
            number, request = _take_lost(devices)
            deadline = arrival[request] + pool[pool[SLO] + number]
        else:
            next_arrival = arrival[at] if at < num_requests else NEVER
            next_end = least_of(devices.ends, 0, NEVER)
            next_change = truth.change_at[change]
            next_timer = next_wake(policy, pool)
            if min(next_arrival, next_end, next_timer) >= NEVER and (
                pool[NUM_QUEUED] == 0 or (next_change >= NEVER and not can_help(fleet, pool))
            ):
                return now
            now = max(now, min(next_arrival, next_end, next_change, fleet.numbers[NEXT], next_timer))
            if next_end <= now:
                freed = _end(pool, truth, arrival, outcome, devices, fleet, now)
            elif next_change <= now:
                freed = _change(pool, truth, outcome, devices, fleet, change, now)
                change += 1
            elif fleet.numbers[NEXT] <= now:
                freed = _scale(pool, devices, fleet, now)
            elif next_timer <= now:
                wake(policy, pool, now)
            else:
                number, request = int(queue[at]), at
                model = pool[pool[MODEL] + number]
                deadline = now + pool[pool[SLO] + model]
                outcome.counts[model, NUM_ARRIVED] += now >= truth.counted_from
                if fleet.numbers[IS_ON]:
                    note_arrival(fleet.scaler, pool, now, number)
                at += 1
        if request >= 0:
            arrive(policy, pool, now, number, request, deadline)
        if freed >= 0:
            free(policy, pool, now, freed)
        decision = 0
        while decision < pool[NUM_DECISIONS]:
            _carry_out(pool, truth, arrival, outcome, devices, pool[DECISION] + decision * WIDTH, now)
            decision += 1
        clear(pool)


@inlined
def _end(
    pool: Ints, truth: Truth, arrival: Ints, outcome: ServingRun, devices: DeviceBehaviour, fleet: FleetSeries, now: int
) -> int:
    """End the batch that ends first; its device starts its next batch if it has one.

    Returns the device; -1 if it is down for the policy: a device that is down and still busy is draining.
    """
    work, requests = devices.work, devices.requests
    device = first_of(devices.ends, 0)
    is_up = pool[pool[DEVICE] + device] != DOWN
    take_out(devices.ends, 0, device)
    _record(pool, outcome, truth, arrival, requests[device], work[device, 1], work[device, 0], now)
    outcome.busy[device] += now - work[device, 2]
    after = device + len(work) // 2
    if work[after, 1] > 0:
        work[device], requests[device] = work[after], requests[after]
        work[after, 1] = 0
        begin = max(now, work[device, 2])
        work[device, 2] = begin
        if is_up:
            begin_waiting(pool, work[device, 0], work[device, 1], device, begin)
        put(devices.ends, 0, device, begin + _draw_length(pool, truth, device, work[device, 0], work[device, 1]))
    elif not is_up:
        release(fleet, device, now)
    return device if is_up else -1


@compiled
def _change(
    pool: Ints, truth: Truth, outcome: ServingRun, devices: DeviceBehaviour, fleet: FleetSeries, change: int, now: int
) -> int:
    """Fail a device, or let it return; in a deployment that scales, a returned device may be started again.

    Returns the device that has come up, or -1.
    """
    device, is_down = truth.change_device[change], pool[pool[DEVICE] + truth.change_device[change]] == DOWN
    if truth.change_up[change] == 0:
        go_down(pool, device)
        _give_up(outcome, devices, device, now)
        if fleet.numbers[IS_ON]:
            fail_device(fleet, device, now)
            note_devices(fleet, pool, now)
    elif fleet.numbers[IS_ON]:
        fleet.table[FAILED, device] = 0
    elif is_down:
        empty_memory(devices.there_at, devices.memory, device)
        come_up(pool, device, now)
        return int(device)
    return -1


@compiled
def _scale(pool: Ints, devices: DeviceBehaviour, fleet: FleetSeries, now: int) -> int:
    """Let a started device come up; else decide on the number of devices and drain surplus ones.

    Returns the device that has come up, or -1.
    """
    up = take_ready(fleet, now)
    if up >= 0:
        empty_memory(devices.there_at, devices.memory, up)
        come_up(pool, up, now)
    else:
        for _ in range(decide_on_devices(fleet, pool, now)):
            device = device_to_drain(pool)
            go_down(pool, device)
            leave(fleet, device, is_in(devices.ends, 0, device), now)
    note_devices(fleet, pool, now)
    return int(up)


@inlined
def _carry_out(
    pool: Ints, truth: Truth, arrival: Ints, outcome: ServingRun, devices: DeviceBehaviour, row: int, now: int
) -> None:
    """Carry out one row of decisions."""
    kind, target, count, begin = pool[row], pool[row + 1], pool[row + 4], pool[row + 5]
    first, model = pool[CHOSEN] + pool[row + 3], pool[pool[MODEL] + pool[row + 2]]
    if kind == RUN:
        begin = max(now, begin)
        if len(devices.there_at) > 0:
            check_there(devices.there_at, target, model, begin)
        is_next = is_in(devices.ends, 0, target)
        slot = target + len(devices.work) // 2 if is_next else target
        devices.work[slot, 0], devices.work[slot, 1], devices.work[slot, 2] = model, count, begin
        for offset in range(count):
            devices.requests[slot, offset] = pool[first + offset]
        if not is_next:
            put(devices.ends, 0, target, begin + _draw_length(pool, truth, target, model, count))
    elif kind == DROP:
        for chosen in range(first, first + count):
            outcome.counts[model, NUM_DROPPED + target] += arrival[pool[chosen]] >= truth.counted_from
    elif kind >= LOAD:
        move_weights(truth.weights, devices.there_at, devices.memory, kind, target, model, begin)
        outcome.loads[target] += kind == LOAD
    else:
        _give_up(outcome, devices, target, now)


@inlined
def _draw_length(pool: Ints, truth: Truth, device: int, model: int, count: int) -> int:
    """Draw the true time (ns) of a batch."""
    factor = 1.0 / truth.speed[device]
    if truth.jitter > 0.0:
        factor *= np.exp(truth.jitter * np.random.normal() - 0.5 * truth.jitter * truth.jitter)  # noqa: NPY002
    return int(min(truth.latency[model * pool[ROW] + count] * factor, _LONGEST))


@compiled
def _give_up(outcome: ServingRun, devices: DeviceBehaviour, device: int, now: int) -> None:
    """Lose a device's current batch and its next one."""
    if not is_in(devices.ends, 0, device):
        return
    take_out(devices.ends, 0, device)
    outcome.busy[device] += max(now - devices.work[device, 2], 0)
    lost, size = devices.lost, (len(devices.lost) - 2) // 2
    for slot in (device, device + len(devices.work) // 2):
        model, count = devices.work[slot, 0], devices.work[slot, 1]
        devices.work[slot, 1] = 0
        outcome.counts[model, NUM_LOST] += count
        for place in range(count):
            row = 2 + 2 * (lost[1] % size)
            lost[row], lost[row + 1] = model, devices.requests[slot, place]
            lost[1] += 1


@compiled
def _take_lost(devices: DeviceBehaviour) -> tuple[int, int]:
    """Take a lost request out of the ring; return its model and its number.

    It is resubmitted as an event of its own: one batch may cause more decisions than fit.
    """
    lost = devices.lost
    row = 2 + 2 * (lost[0] % ((len(lost) - 2) // 2))
    lost[0] += 1
    return lost[row], lost[row + 1]


@inlined
def _record(
    pool: Ints, outcome: ServingRun, truth: Truth, arrival: Ints, requests: Ints, count: int, model: int, now: int
) -> None:
    slo = pool[pool[SLO] + model]
    scale, counts = PLACES / slo, False
    for place in range(count):
        moment = arrival[requests[place]]
        if moment >= truth.counted_from:
            counts = True
            outcome.histogram[model, min(int((now - moment) * scale), PLACES * SLOS - 1)] += 1
            outcome.counts[model, NUM_IN_TIME if now - moment <= slo else NUM_TOO_LATE] += 1
    if counts:
        outcome.counts[model, NUM_BATCHES] += 1
        outcome.batches[count] += 1


simulate_plainly = uncompiled(globals(), "simulate_events")
