"""How many devices are wanted: a decision that the simulator and a server make by the same compiled functions.

The **scaler** is an array of int64 beside the pool, with all that the decision remembers: a copy of it and of the pool,
and the same calls at the same moments, give the same decisions again. A driver calls

    note_arrival(scaler, pool, now, queue)    at each arrival, before or after the policy is told
    wanted_devices(scaler, pool, now)         every so often: how many devices there should be
    device_to_drain(pool)                     which one goes, where there are more; then `queues.go_down`

A device that is to go is down for the policy at once, so that it gets no more batches, while it ends those that it has:
their answers count, and the device is not free after them. One that was started is there when it `queues.come_up`; one
that has failed is not. Devices that are being started the driver counts itself.

What is wanted, for rates r, the device time u of a request in the batches of the staggered equation (`batching`), and
deadlines after L:

    needed       Σ r u: the staggered equation, which holds for regular arrivals
    head-room    z √(Σ r u² D / L): the deviation of the device time that comes within L (square-root staffing); z is
                 the normal quantile of the target, D the dispersion of arrivals: 1 of Poisson's, more where bursts come
    queued       the devices that end what waits within L, for policies that drop nothing

Where more requests are dropped than the target allows, though all devices are there that were wanted, one device more,
or as many more as the share that was dropped, is wanted at once; by how much the equations were wrong is remembered,
and forgotten slowly. Less is wanted when less has been needed for the time ``CALM``, at the upper end of what the rates
are known to. Nothing is forecast: while devices start, what comes is served by those that are there.

Sources: square-root staffing is Halfin and Whitt's (Operations Research 29, 1981); that the highest of the last
recommendations is kept before scaling down is what Kubernetes calls a stabilization window. The rest is our own.
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

# Numbers: bounds of what is wanted; ns for which less must have been needed; the quantile, and what more than is needed
# the equations turned out to need, in thousandths; the share that may be dropped, in millionths; the last decision:
# when it was, requests dropped and devices there until then, and what was wanted; since when less is needed, and the
# most that was; decisions so far; models.
MINIMUM, MAXIMUM, CALM, QUANTILE, CORRECTION, SPARE = range(6)
SINCE, DROPPED, UP, WANTED, LESS_SINCE, LESS, DECIDED, NUM_MODELS = range(6, 14)
_FIRST = 14

# Of each model: arrivals since the last decision; those in the span of an SLO that goes on and in the one before it
# (-1: there is none), and when the span ends; spans, arrivals in them and the squares of the differences between
# neighbours, since the dispersion was measured; the rate, as in a pool; the dispersion in thousandths.
COUNT, IN_SPAN, BEFORE, SPAN_END, SPANS, IN_SPANS, SQUARES, RATE, DISPERSION = range(9)
_WIDTH = 9

# Decisions that a rate is the mean of; deviations by which a count must leave it to replace it, and requests, too, as
# the few of a rare model say little; so many deviations of its error it must be lower before less is wanted.
_MEMORY, _SUDDEN, _AT_LEAST, _SURE = 8, 4.0, 4, 3.0
# A dispersion is measured over so many spans.
_SPANS = 16
_ONE = 1000
# The most that a decision asks for because of drops, by devices that are there; the most that is remembered of it, and
# how many times ``CALM`` it takes to forget.
_MOST_MORE, _MOST_CORRECTION, _FORGET = 2.0, 4.0, 16
_ROUNDING = 1e-9


def allocate_scaler(
    num_models: int, *, minimum: int, maximum: int, calm_ns: int = 60 * 10**9, target: float = 0.99, now: int = 0
) -> Ints:
    """A scaler that knows nothing of any rate and wants the minimum.

    Args:
        num_models: models of the pool.
        minimum: the fewest devices, and `maximum` the most, that are ever wanted.
        maximum: see above.
        calm_ns: for how long fewer must have been enough before fewer are wanted.
        target: share of requests that is to be in time, between 0.5 and 1.
        now: the moment from which arrivals are noted.
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
    """Let a scaler know what another one did: of each model by its place there, -1 if it was not there."""
    kept = [CORRECTION, SINCE, DROPPED, UP, WANTED, LESS_SINCE, LESS, DECIDED]
    scaler[kept] = before[kept]
    for model, place in enumerate(places):
        if place >= 0:
            old = _FIRST + place * _WIDTH
            scaler[_FIRST + model * _WIDTH : _FIRST + (model + 1) * _WIDTH] = before[old : old + _WIDTH]


@compiled
def note_arrival(scaler: Ints, pool: Ints, now: int, queue: int) -> None:
    """A request has come for the queue of a model, whose number is that of the model."""
    at = _FIRST + queue * _WIDTH
    if now >= scaler[at + SPAN_END]:
        _end_span(scaler, at, now, pool[pool[SLO] + queue])
    scaler[at + IN_SPAN] += 1
    scaler[at + COUNT] += 1


@compiled
def wanted_devices(scaler: Ints, pool: Ints, now: int) -> int:
    """How many devices there should be from now on; those that are being started are among them."""
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
    """The device that goes first: the last idle one, or else the last that is up; -1 if none is."""
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
    """How many devices, the last in part, serve a rate (requests per ns) in turns: `batching.devices_for`."""
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
    """What an SLO leaves for waiting and for the batch."""
    return max(pool[pool[SLO] + model] - pool[SLACK] - pool[DELAY], 1)


@compiled
def _end_span(scaler: Ints, at: int, now: int, slo: int) -> None:
    """The span of a model is over; those behind it that are over, too, were empty."""
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
    """Renew the rate of a model by what came since the last decision, and the dispersion where enough is known."""
    weight = max(1.0 / _MEMORY, 1.0 / (scaler[DECIDED] + 1))
    if scaler[at + SPANS] >= _SPANS and scaler[at + IN_SPANS] >= _SPANS:
        # Neighbours differ by twice the variance, however the rate changes over more than a few spans.
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
    """Devices that all rates need; the deviation of what comes within an SLO, in devices; the error of the first."""
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
    """Devices that end what waits in each queue within its model's SLO."""
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
    """Devices that are wanted as those that are there, which are all that were wanted, drop too many requests."""
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
