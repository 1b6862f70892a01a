"""Arrival times of requests, drawn beforehand (open loop: no client waits for an answer before it sends again).

Each model has its own random generator, seeded by (seed, index of the model, copy): changing one model, the policy or
the devices leaves the requests of all other models unchanged. Models of Poisson arrivals with equal rates share one
generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import (
    Arrivals,
    Diurnal,
    DocumentError,
    Gamma,
    Poisson,
    ServedModel,
    ServingError,
    Trace,
    read_regular,
)

MOST_TRACE_BYTES = 2**30
# Characters of an invalid line that a message shows.
_SHOWN = 80
# Drawing and sorting needs about fifty bytes per request: moments in seconds and in nanoseconds, owners, the order,
# and both sorted. This number of requests needs a machine of 32 GB.
MOST_REQUESTS = 500_000_000

Floats = NDArray[np.float64]


def mean_rate(arrivals: Arrivals) -> float:
    """Return the mean rate in requests per second. Raises DocumentError for a trace that cannot be read."""
    if not isinstance(arrivals, Trace):
        return arrivals.rate
    moments = trace_moments(arrivals)
    return float(len(moments) / moments[-1] * arrivals.speed)


def trace_moments(trace: Trace) -> Floats:
    """Return the arrival times (s) in a trace's file, ascending. Raises DocumentError if it cannot be read."""
    return _read_trace(trace.file)


def draw_arrivals(
    models: Sequence[ServedModel], seconds: float, *, seed: int = 0, scale: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the arrival times (ns, ascending) of all requests within ``seconds``, and the model index of each request.

    Each copy of a model has its own index. ``scale`` multiplies all rates; traces are played faster by this factor.
    Raises ServingError for too many requests, or if they do not fit into memory.
    """
    if not (0 < seconds < math.inf and 0 <= scale < math.inf):
        raise ServingError(
            f"Got a time of {seconds:g} s and a scale of {scale:g}; expected more than 0 s and a scale of at least 0."
        )
    expected = sum(_expected(model.arrivals, seconds, scale) * model.copies for model in models)
    if expected > MOST_REQUESTS:
        raise ServingError(
            f"{expected:.3g} requests are expected in {seconds:g} s; at most {MOST_REQUESTS:.3g} are simulated. "
            "Simulate fewer seconds."
        )
    try:
        return _draw_all(models, seconds, seed, scale)
    except MemoryError:
        raise ServingError(
            f"{expected:.3g} requests are expected in {seconds:g} s, and they do not fit into memory. Simulate fewer "
            "seconds."
        ) from None


def _expected(arrivals: Arrivals, seconds: float, scale: float) -> float:
    """Expected number of requests of one copy; for a trace the exact number."""
    if isinstance(arrivals, Trace):
        return float(trace_moments(arrivals).searchsorted(seconds * arrivals.speed * scale))
    return mean_rate(arrivals) * seconds * scale


def _draw_all(
    models: Sequence[ServedModel], seconds: float, seed: int, scale: float
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    moments, owners = [], []
    for number, owned in _poisson(models, seconds, seed, scale):
        moments.append(number)
        owners.append(owned)
    first = 0
    for place, model in enumerate(models):
        if not isinstance(model.arrivals, Poisson):
            for copy in range(model.copies):
                drawn = _draw(model.arrivals, seconds, scale, np.random.default_rng([seed, place, copy]))
                moments.append(drawn)
                owners.append(np.full(len(drawn), first + copy, np.int32))
        first += model.copies
    at = (np.concatenate(moments) * 1e9).astype(np.int64) if moments else np.zeros(0, np.int64)
    whose = np.concatenate(owners) if owners else np.zeros(0, np.int32)
    if len(moments) > 1:
        order = np.argsort(at, kind="stable")
        at, whose = at[order], whose[order]
    return at, whose


def _poisson(
    models: Sequence[ServedModel], seconds: float, seed: int, scale: float
) -> Iterator[tuple[Floats, NDArray[np.int32]]]:
    """Draw all Poisson arrivals of equal rate as one process and assign each request at random: saves sorting."""
    first = 0
    groups: dict[float, list[NDArray[np.int32]]] = {}
    for model in models:
        if isinstance(model.arrivals, Poisson) and model.arrivals.rate > 0:
            numbers = np.arange(first, first + model.copies, dtype=np.int32)
            groups.setdefault(model.arrivals.rate, []).append(numbers)
        first += model.copies
    for rate, members in groups.items():
        numbers = np.concatenate(members)
        rng = np.random.default_rng([seed, int(numbers[0]), 2**31])
        moments = _homogeneous(rate * scale * len(numbers), seconds, rng)
        yield moments, numbers[rng.integers(0, len(numbers), len(moments), dtype=np.int32)]


def _homogeneous(rate: float, seconds: float, rng: np.random.Generator) -> Floats:
    """Draw the number, then the moments, which are uniform given their number: scaled sums of exponential gaps."""
    count = int(rng.poisson(rate * seconds))
    gaps = rng.standard_exponential(count + 1)
    np.cumsum(gaps, out=gaps)
    moments: Floats = gaps[:-1] * (seconds / gaps[-1])
    return moments


def _draw(arrivals: Gamma | Diurnal | Trace, seconds: float, scale: float, rng: np.random.Generator) -> Floats:
    match arrivals:
        case Gamma():
            return _gamma(arrivals.rate * scale, arrivals.shape, seconds, rng)
        case Diurnal():
            moments = _homogeneous(arrivals.high * scale, seconds, rng)
            swing = 0.5 * (1 - np.cos(2 * np.pi * moments / arrivals.period))
            chance = (arrivals.low + (arrivals.high - arrivals.low) * swing) / max(arrivals.high, 1e-300)
            return moments[rng.random(len(moments)) < chance]
        case Trace():
            if scale == 0:
                return np.zeros(0)
            moments = trace_moments(arrivals) / (arrivals.speed * scale)
            return moments[moments < seconds]
        case _:
            assert_never(arrivals)


def _gamma(rate: float, shape: float, seconds: float, rng: np.random.Generator) -> Floats:
    """Draw gaps until they fill the time, which starts at a random point within the first gap.

    A random point falls into a gap with probability proportional to its length: that gap has shape + 1.
    """
    if rate == 0:
        return np.zeros(0)
    mean = 1 / rate
    reached = rng.random() * rng.gamma(shape + 1, mean / shape)
    pieces = [np.array([reached])]
    while reached < seconds:
        count = int((seconds - reached) * rate * 1.05) + 64
        moments = reached + np.cumsum(rng.gamma(shape, mean / shape, count))
        pieces.append(moments)
        reached = float(moments[-1])
    moments = np.concatenate(pieces)
    return moments[moments < seconds]


@cache
def _read_trace(file: str) -> Floats:
    content = read_regular(Path(file), MOST_TRACE_BYTES + 1)
    if len(content) > MOST_TRACE_BYTES:
        raise DocumentError(f"{file}: more than {MOST_TRACE_BYTES} bytes; split the trace.")
    try:
        moments = np.array(content.split(), dtype=np.float64)
    except ValueError:
        raise DocumentError(f"{file}{_what_is_wrong(content)}") from None
    if len(moments) < 2 or not np.isfinite(moments).all() or moments[0] < 0 or (np.diff(moments) < 0).any():
        raise DocumentError(f"{file}{_what_is_wrong(content)}")
    if moments[-1] == 0:
        raise DocumentError(f"{file}: all its moments are 0; expected seconds since the start of the trace.")
    return moments


def _what_is_wrong(content: bytes) -> str:
    """Describe the first invalid line of a trace, or state that it has too few moments."""
    last, shown = 0.0, ""
    for number, line in enumerate(content.splitlines(), 1):
        for word in line.split():
            before, shown = shown, word[:_SHOWN].decode(errors="replace")
            try:
                moment = float(word)
            except ValueError:
                return f", line {number}: {shown!r} is not a number; expected a moment in seconds in each line."
            if not 0 <= moment < math.inf:
                return f", line {number}: the moment is {shown}; expected seconds since the start of the trace."
            if moment < last:
                return f", line {number}: {shown} follows {before}; expected ascending moments."
            last = moment
    return f": {'one moment' if shown else 'no moments'}; expected at least two moments in seconds, one per line."
