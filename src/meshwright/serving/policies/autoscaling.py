"""Autoscaling: decide how many devices are wanted, by the same compiled functions in the simulator and in a server.

The **scaler** is an array of int64 next to the pool, with all state of the decision: with copies of scaler and pool,
the same calls at the same moments give the same decisions again. A driver (the simulator or a server's scheduler) calls

    note_arrival(scaler, pool, now, queue)    at each arrival, before or after the policy's ``arrive``
    wanted_devices(scaler, pool, now)         at intervals: how many devices there should be
    device_to_drain(pool)                     if there are more: which device to drain; then `queues.go_down`

A device that is drained is down for the policy at once, so that it gets no more batches, but it finishes those that it
has. A device that was started is up from `queues.come_up` on; a failed device is down. The driver itself counts devices
that are starting.

The wanted number, for rates r, the device time u of a request in the batches of the staggered equation (`batching`),
and deadlines after L, follows from

    needed       Σ r u: the staggered equation, which holds for regular arrivals
    head-room    z √(Σ r u² D / L): the deviation of the device time that arrives within L (square-root staffing); z is
                 the normal quantile of the target, D the dispersion of arrivals: 1 for Poisson's, more for bursts
    queued       the devices that end all waiting requests within L, for policies that drop nothing

If more requests are dropped than the target allows although all wanted devices are up, at least one device more is
wanted at once, or more in proportion to the share that was dropped. A correction factor, which decays slowly, then
keeps the equations from giving too few. Fewer devices are wanted when fewer have been enough for the time ``CALM``, at
the upper confidence limit of the rates. Load is not forecast: while devices start, the others serve the requests.

Sources: square-root staffing is Halfin and Whitt's (Operations Research 29, 1981); keeping the highest of the last
recommendations before scaling down is what Kubernetes calls a stabilization window. The rest is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from statistics import NormalDist

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.meter import PER_NS
from meshwright.serving.policies.pool import (
    DELAY,
    DEVICE,
    DOWN,
    IDLE,
    MODEL,
    MOST,
    NUM_DEVICES,
    NUM_DROPPED,
    NUM_QUEUES,
    NUM_UP,
    SLACK,
    SLO,
    Ints,
)
from meshwright.serving.policies.queues import latency_of, length_of

# Numbers: bounds of the wanted number; ns for which fewer must have been needed; the quantile, and the correction
# factor of the equations, in thousandths; the share that may be dropped, in millionths; of the last decision: its
# moment, requests dropped and devices up until then, and the wanted number; since when fewer are needed, and the most
# of that time; decisions so far; models.
MINIMUM, MAXIMUM, CALM, QUANTILE, CORRECTION, SPARE = range(6)
SINCE, DROPPED, UP, WANTED, LESS_SINCE, LESS, DECIDED, NUM_MODELS = range(6, 14)
_FIRST = 14

# Of each model: arrivals since the last decision; arrivals in the current span of an SLO and in the one before it
# (-1: no such span), and the end of the span; spans, arrivals in them and the squares of the differences between
# neighbours, since the dispersion was measured; the rate, as in a pool; the dispersion in thousandths.
COUNT, IN_SPAN, BEFORE, SPAN_END, SPANS, IN_SPANS, SQUARES, RATE, DISPERSION = range(9)
_WIDTH = 9

# Decisions that a rate is the mean of; deviations by which a count must exceed it to replace it, and requests, too,
# as the few of a rare model say little; deviations of its error by which it must be lower before fewer are wanted.
_MEMORY, _SUDDEN, _AT_LEAST, _SURE = 8, 4.0, 4, 3.0
# Spans over which a dispersion is measured.
_SPANS = 16
_ONE = 1000
# The most that a decision wants because of drops, relative to the devices that are up; the largest correction; and how
# many times ``CALM`` it takes to forget it.
_MOST_MORE, _MOST_CORRECTION, _FORGET = 2.0, 4.0, 16
_ROUNDING = 1e-9


def allocate_scaler(
    num_models: int, *, minimum: int, maximum: int, calm_ns: int = 60 * 10**9, target: float = 0.99, now: int = 0
) -> Ints:
    """Allocate a scaler without measured rates; the wanted number of devices is the minimum.

    Args:
        num_models: models of the pool.
        minimum: the fewest devices that are ever wanted.
        maximum: the most devices that are ever wanted.
        calm_ns: for how long fewer devices must have been enough before fewer are wanted.
        target: share of requests that should be in time, between 0.5 and 1.
        now: the moment from which arrivals are noted (ns).
    """
    scaler = np.zeros(_FIRST + num_models * _WIDTH, np.int64)
    scaler[[MINIMUM, MAXIMUM, CALM, NUM_MODELS]] = minimum, maximum, calm_ns, num_models
    scaler[QUANTILE] = round(NormalDist().inv_cdf(target) * _ONE)
    scaler[SPARE] = round((1 - target) * 1e6)
    scaler[CORRECTION] = _ONE
    scaler[[SINCE, LESS_SINCE]] = now
    scaler[[WANTED, UP]] = minimum
    scaler[_FIRST + DISPERSION :: _WIDTH] = _ONE
    scaler[_FIRST + BEFORE :: _WIDTH] = -1
    return scaler


def carry_scaler(scaler: Ints, before: Ints, places: Sequence[int]) -> None:
    """Copy the state of the scaler ``before``; ``places[i]`` is the index of model i there, or -1 for a new model."""
    kept = [CORRECTION, SINCE, DROPPED, UP, WANTED, LESS_SINCE, LESS, DECIDED]
    scaler[kept] = before[kept]
    for model, place in enumerate(places):
        if place >= 0:
            old = _FIRST + place * _WIDTH
            scaler[_FIRST + model * _WIDTH : _FIRST + (model + 1) * _WIDTH] = before[old : old + _WIDTH]


@compiled
def note_arrival(scaler: Ints, pool: Ints, now: int, queue: int) -> None:
    """Count a request that has arrived at ``now`` (ns); ``queue`` is the index of its model."""
    at = _FIRST + queue * _WIDTH
    if now >= scaler[at + SPAN_END]:
        _end_span(scaler, at, now, pool[pool[SLO] + queue])
    scaler[at + IN_SPAN] += 1
    scaler[at + COUNT] += 1


@compiled
def wanted_devices(scaler: Ints, pool: Ints, now: int) -> int:
    """Decide how many devices there should be from now on, including those that are starting."""
    elapsed = max(now - scaler[SINCE], 1)
    arrived = 0
    for model in range(scaler[NUM_MODELS]):
        at = _FIRST + model * _WIDTH
        arrived += scaler[at + COUNT]
        if now >= scaler[at + SPAN_END]:
            _end_span(scaler, at, now, pool[pool[SLO] + model])
        _measure(scaler, at, elapsed)
    needed, deviation, error = _from_rates(scaler, pool, elapsed)
    planned = needed + scaler[QUANTILE] / _ONE * deviation
    at_once = max(_of_queues(scaler, pool), _of_drops(scaler, pool, planned, arrived, elapsed))
    correction = scaler[CORRECTION] / _ONE
    most = _bounded(scaler, max(planned * correction, at_once))
    least = _bounded(scaler, max((planned + _SURE * error) * correction, at_once))
    if most >= scaler[WANTED]:
        scaler[WANTED] = most
        scaler[LESS_SINCE] = now
        scaler[LESS] = 0
    else:
        scaler[LESS] = max(scaler[LESS], least)
        if now - scaler[LESS_SINCE] >= scaler[CALM]:
            scaler[WANTED] = min(scaler[LESS], scaler[WANTED])
            scaler[LESS_SINCE] = now
            scaler[LESS] = 0
    scaler[SINCE] = now
    scaler[DROPPED] = pool[NUM_DROPPED]
    scaler[UP] = pool[NUM_UP]
    scaler[DECIDED] += 1
    return int(scaler[WANTED])


@compiled
def device_to_drain(pool: Ints) -> int:
    """Return the device to drain: the idle device with the highest number, or else the highest that is up, or -1."""
    last = -1
    for device in range(pool[NUM_DEVICES] - 1, -1, -1):
        state = pool[pool[DEVICE] + device]
        if state == IDLE:
            return device
        if state != DOWN and last < 0:
            last = device
    return last


@compiled
def staggered_devices(pool: Ints, model: int, rate: float) -> float:
    """Return how many devices, not rounded, a model needs for a rate (requests per ns), as `batching.devices_for`."""
    if rate <= 0.0:
        return 0.0
    slo = _time_of(pool, model)
    most = pool[pool[MOST] + model]
    size, unit = 1, float(latency_of(pool, model, 1))
    while size < most and latency_of(pool, model, size + 1) + (size + 1) / rate <= slo:
        size += 1
        unit = min(unit, latency_of(pool, model, size) / size)
    needed = rate * unit
    if size < most:
        larger = latency_of(pool, model, size + 1)
        if larger < slo:
            needed = min(needed, larger / (slo - larger))
    return needed


@compiled
def _time_of(pool: Ints, model: int) -> int:
    """Return the part of an SLO (ns) that is left for waiting and for the batch."""
    return max(pool[pool[SLO] + model] - pool[SLACK] - pool[DELAY], 1)


@compiled
def _end_span(scaler: Ints, at: int, now: int, slo: int) -> None:
    """End the span of a model; spans after it that are also over were empty."""
    count, before, end = scaler[at + IN_SPAN], scaler[at + BEFORE], scaler[at + SPAN_END]
    scaler[at + SPAN_END] = now - now % slo + slo
    if end == 0:
        return
    scaler[at + IN_SPAN] = 0
    if before >= 0:
        scaler[at + SQUARES] += (count - before) ** 2
        scaler[at + IN_SPANS] += count
        scaler[at + SPANS] += 1
    if now >= end + slo and count > 0:
        scaler[at + SQUARES] += count * count
        scaler[at + SPANS] += 1
        count = 0
    scaler[at + BEFORE] = count


@compiled
def _measure(scaler: Ints, at: int, elapsed: int) -> None:
    """Renew the rate of a model by arrivals since the last decision, and the dispersion if enough spans are known."""
    weight = max(1.0 / _MEMORY, 1.0 / (scaler[DECIDED] + 1))
    if scaler[at + SPANS] >= _SPANS and scaler[at + IN_SPANS] >= _SPANS:
        # Neighbours differ by twice the variance, even if the rate changes over more than a few spans.
        measured = scaler[at + SQUARES] / (2.0 * scaler[at + IN_SPANS])
        known = scaler[at + DISPERSION] / _ONE
        scaler[at + DISPERSION] = max(int((known + weight * (measured - known)) * _ONE), _ONE)
        scaler[at + SPANS] = scaler[at + IN_SPANS] = scaler[at + SQUARES] = 0
    count, rate = scaler[at + COUNT], scaler[at + RATE] * PER_NS
    expected = rate * elapsed
    deviation = sqrt(expected * scaler[at + DISPERSION] / _ONE)
    if count > expected + _SUDDEN * deviation + _AT_LEAST:
        weight = 1.0
    scaler[at + RATE] = int((rate + weight * (count / elapsed - rate)) / PER_NS)
    scaler[at + COUNT] = 0


@compiled
def _from_rates(scaler: Ints, pool: Ints, elapsed: int) -> tuple[float, float, float]:
    """Return devices needed for all rates, the deviation of arrivals within an SLO, and the error of the first."""
    needed, variance, error = 0.0, 0.0, 0.0
    for model in range(scaler[NUM_MODELS]):
        at = _FIRST + model * _WIDTH
        rate = scaler[at + RATE] * PER_NS
        if rate > 0.0:
            devices = staggered_devices(pool, model, rate)
            spread = devices * devices / rate * scaler[at + DISPERSION] / _ONE
            needed += devices
            variance += spread / _time_of(pool, model)
            error += spread / (_MEMORY * elapsed)
    return needed, sqrt(variance), sqrt(error)


@compiled
def _of_queues(scaler: Ints, pool: Ints) -> float:
    """Return the devices that end the waiting requests of each queue within its model's SLO."""
    needed = 0.0
    for queue in range(pool[NUM_QUEUES]):
        length = length_of(pool, queue)
        if length > 0:
            model = pool[pool[MODEL] + queue]
            rate = max(scaler[_FIRST + model * _WIDTH + RATE] * PER_NS, PER_NS)
            needed += length * staggered_devices(pool, model, rate) / rate / _time_of(pool, model)
    return needed


@compiled
def _of_drops(scaler: Ints, pool: Ints, planned: float, arrived: int, elapsed: int) -> float:
    """Return the devices that are wanted because the current ones, all that were wanted, drop too many requests."""
    if scaler[CALM] > 0:
        forgotten = min(elapsed / (_FORGET * scaler[CALM]), 1.0)
        scaler[CORRECTION] -= int((scaler[CORRECTION] - _ONE) * forgotten)
    dropped, up = pool[NUM_DROPPED] - scaler[DROPPED], pool[NUM_UP]
    is_steady = up == scaler[UP] and up == scaler[WANTED] and up < scaler[MAXIMUM]
    if not is_steady or dropped <= scaler[SPARE] * 1e-6 * arrived + 1.0:
        return 0.0
    served = max(arrived - dropped, 0)
    needed = max(up * min(arrived / max(served, 1), _MOST_MORE), up + 1.0)
    if planned > 0.0:
        correction = int(min(needed / planned, _MOST_CORRECTION) * _ONE)
        scaler[CORRECTION] = max(scaler[CORRECTION], correction)
    return needed


@compiled
def _bounded(scaler: Ints, devices: float) -> int:
    whole = ceil(min(devices, float(scaler[MAXIMUM])) - _ROUNDING)
    return min(max(whole, scaler[MINIMUM]), scaler[MAXIMUM])
