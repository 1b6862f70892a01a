"""Times of failures, in order, each with its repair time.

The failures of n equal parts, each at random with a mean of m seconds, are at random with a mean of m / n in total.
Under Weibull's law with another shape each part has its own clock, which restarts at every failure of the part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.spec.scenario import Failures, Scenario


class Failure(NamedTuple):
    """The time of a failure in seconds of the run, and the seconds until it is repaired."""

    at_s: float
    repair_s: float


def failures_of(scenario: Scenario, num_devices: int, num_nodes: int, seed: int) -> Iterator[Failure]:
    """Yield all failures of a run on the given numbers of devices and nodes, in order; usually without end."""
    streams = []
    for place, effect in enumerate(scenario.effects):
        if isinstance(effect, Failures):
            count = num_devices if effect.of == "device" else num_nodes
            moments = _moments(effect, count, np.random.default_rng((seed, place)))
            streams.append(_with_repair(moments, float(effect.repair)))
    return heapq.merge(*streams)


def mean_time_to_failure(scenario: Scenario, num_devices: int, num_nodes: int) -> float | None:
    """Return the mean seconds between failures of all parts; None if no mean is given."""
    rates = [
        (num_devices if effect.of == "device" else num_nodes) / effect.mttf
        for effect in scenario.effects_of(Failures)
        if effect.mttf is not None
    ]
    return 1 / sum(rates) if rates else None


def effective_repair(scenario: Scenario, num_devices: int, num_nodes: int) -> float:
    """Return the one repair time that gives the same mean run time as the repairs of all kinds of failures.

    For failures without memory that restart a repair: with shares w of repairs r it is -M ln Σ w e^(-r/M).
    """
    effects = [effect for effect in scenario.effects_of(Failures) if effect.mttf is not None]
    if not effects:
        return 0.0
    mttf_s = mean_time_to_failure(scenario, num_devices, num_nodes) or math.inf
    counts = [num_devices if effect.of == "device" else num_nodes for effect in effects]
    shares = [mttf_s * count / float(effect.mttf or 1) for count, effect in zip(counts, effects, strict=True)]
    shortest = min(float(effect.repair) for effect in effects)
    hoped = sum(
        share * math.exp((shortest - effect.repair) / mttf_s) for share, effect in zip(shares, effects, strict=True)
    )
    return shortest - mttf_s * math.log(hoped)


def are_at_random(scenario: Scenario) -> bool:
    """Whether failures are memoryless, so that closed forms hold."""
    return all(effect.mttf is not None and effect.shape == 1 for effect in scenario.effects_of(Failures))


def _with_repair(moments: Iterator[float], repair_s: float) -> Iterator[Failure]:
    return (Failure(at_s, repair_s) for at_s in moments)


def _moments(effect: Failures, count: int, random: np.random.Generator) -> Iterator[float]:
    if effect.mttf is None:
        yield from sorted(map(float, effect.times))
        return
    if effect.shape == 1:
        at_s = 0.0
        while True:
            at_s += float(random.exponential(effect.mttf / count))
            yield at_s
    scale = effect.mttf / math.gamma(1 + 1 / effect.shape)
    clocks = (scale * random.weibull(effect.shape, count)).tolist()
    heapq.heapify(clocks)
    while True:
        yield clocks[0]
        heapq.heapreplace(clocks, clocks[0] + scale * float(random.weibull(effect.shape)))
