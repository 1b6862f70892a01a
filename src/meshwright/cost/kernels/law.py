"""Stage one of the kernel predictor: seconds of a kernel from its demand and fifteen factors.

A set of factors belongs to a device and a kernel family. The quantities of the demand are explained in `demand`; "ways"
are the tile sizes.

    compute = min over ways of  max(work·(1 + h·loads)/e, pull/u, steps·r) + waves·w + area·o
                                + s₀·log₂ splits + merge/(c·S)
    memory  = (1 - f)·bytes/(B·m) + f·bytes/(c·S),   f = 1/(1 + (passing / (v·L2))^z)  the share that the cache holds
    t       = (floor⁶ + (launch + (compute^p + memory^p)^(1/p) + extra)⁶)^(1/6)

The logarithms of the factors are fitted to ln t with a loss that is linear for large residuals. Normal priors determine
factors that the rows do not. For an unmeasured device, the factors are the mean of the measured devices
(`shared_prior`); a few rows of the device correct them.

Sources: roofline with soft corners (Williams et al., CACM 2009); Levenberg-Marquardt steps; pseudo-Huber loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.cost.costs import Floats
    from meshwright.cost.kernels.demand import Demand

# (factor, prior value, deviation of its logarithm). Rates are shares of the datasheet's. The values are guesses of the
# right order, without a source; the wide deviations (a factor of two for times) let rows correct them.
FACTORS: tuple[tuple[str, float, float], ...] = (
    ("launch_s", 2.5e-6, 0.7),
    ("arithmetic", 0.9, 0.2),
    ("memory", 0.85, 0.15),
    ("cache_bytes_per_s", 15e9, 0.7),
    ("cache_share", 1.0, 0.5),
    ("cache_slope", 3.0, 0.7),
    ("sharpness", 3.0, 0.4),
    ("half_reuse", 5.0, 0.8),
    ("split_s", 5e-7, 0.7),
    ("wave_s", 1.5e-6, 0.7),
    ("pull", 5.0, 0.5),
    ("floor_s", 1e-6, 2.0),
    ("step_s", 5e-8, 0.7),
    ("extra", 1.0, 0.3),
    ("area_s", 1e-10, 1.0),
)
# Factors in seconds or bytes per second are for this clock; they are cycles, and scale with it.
REFERENCE_CLOCK_HZ = 1.83e9
# Seconds of the launch of an additional pass, as for the smallest kernels (`cost.roofline.LAUNCH_S`).
_EXTRA_LAUNCH_S = 1.5e-6
# Residuals beyond this count linearly: the spread of repeated measurements of one kernel.
_SPREAD = 0.1
_MAX_STEPS = 100
_ENOUGH = 1e-4
# The smallest deviation of a factor's logarithm between devices, however similar the measured ones are.
_MIN_DEVIATION = 0.15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prior:
    """A normal prior of the law's factors: mean and standard deviation of their logarithms, shape (factors,)."""

    mean: Floats
    deviation: Floats


def first_prior() -> Prior:
    """Return the prior for a fit without other devices: the values of `FACTORS`."""
    return Prior(
        mean=np.log([value for _, value, _ in FACTORS]), deviation=np.array([deviation for *_, deviation in FACTORS])
    )


def shared_prior(fitted: Sequence[Floats]) -> Prior:
    """Return the prior for a device from the fitted factors (logarithms, shape (factors,)) of one or more others."""
    first = first_prior()
    table = np.array(fitted)
    spread = table.std(axis=0, ddof=1) if len(table) > 1 else first.deviation / 2
    # With n devices, the deviation of a further one from their mean is larger than theirs by √(1 + 1/n).
    deviation = np.maximum(spread * np.sqrt(1 + 1 / len(table)), _MIN_DEVIATION)
    return Prior(mean=table.mean(axis=0), deviation=np.minimum(deviation, first.deviation))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explained:
    """The law's result for each query, in arrays of shape (queries,).

    ``seconds``: total; ``compute``, ``memory``: its two parts; ``way``: index of the fastest tile size in the demand.
    """

    seconds: Floats
    compute: Floats
    memory: Floats
    way: NDArray[np.int64]


def law_seconds(demand: Demand, factors: Floats) -> Explained:
    """Return the law's seconds for a demand; ``factors``: logarithms in the order of `FACTORS`."""
    value = dict(zip((name for name, *_ in FACTORS), np.exp(np.clip(factors, -40.0, 40.0)).tolist(), strict=True))
    cycle = REFERENCE_CLOCK_HZ / demand.clock_hz
    cache_s = cycle / (value["cache_bytes_per_s"] * demand.units)
    way, compute = _fastest(
        demand.ways,
        (
            value["half_reuse"],
            1 / value["arithmetic"],
            1 / value["pull"],
            value["step_s"] * cycle,
            value["wave_s"] * cycle,
            value["area_s"] * cycle,
            value["split_s"] * cycle,
            cache_s,
        ),
    )
    held = 1 / (1 + (demand.cached / value["cache_share"]) ** value["cache_slope"])
    memory = demand.memory * ((1 - held) / value["memory"] + held * demand.bandwidth * cache_s)
    sharpness = value["sharpness"]
    # The larger one is outside of the power, which would overflow for large sizes.
    larger = np.maximum(compute, memory)
    corner = (1 + (np.minimum(compute, memory) / larger) ** sharpness) ** (1 / sharpness)
    kernel = value["launch_s"] * cycle + larger * corner
    beside = np.where(demand.extra > 0, _EXTRA_LAUNCH_S * cycle + demand.extra / value["memory"], 0.0)
    seconds = ((kernel + value["extra"] * beside) ** 6 + value["floor_s"] ** 6) ** (1 / 6)
    return Explained(seconds=seconds, compute=compute, memory=memory, way=way)


@compiled
def _fastest(ways: Floats, factors: tuple[float, ...]) -> tuple[NDArray[np.int64], Floats]:
    """Return (the fastest way of each query, its seconds), each of shape (queries,), from the demand of each way."""
    half_reuse, work_share, pull_share, step_s, wave_s, area_s, split_s, byte_s = factors
    best = np.zeros(ways.shape[2], np.int64)
    compute = np.full(ways.shape[2], np.inf)
    for way in range(len(ways)):
        work, loads, pull, waves, steps, area, doublings, merge, _ = ways[way]
        for i in range(len(best)):
            loops = max(pull[i] * pull_share, steps[i] * step_s)
            busy = max(work[i] * (1 + half_reuse * loads[i]) * work_share, loops)
            beside = waves[i] * wave_s + area[i] * area_s
            seconds = busy + beside + merge[i] * byte_s + doublings[i] * split_s
            best[i] = way if seconds < compute[i] else best[i]
            compute[i] = min(seconds, compute[i])
    return best, compute


def fit_law(demand: Demand, seconds: Floats, prior: Prior) -> Floats:
    """Return the logarithms of the factors, shape (factors,), fitted to measured ``seconds`` of shape (rows,).

    Without rows, the result is the mean of the prior.
    """
    target = np.log(seconds)
    factors, damping = prior.mean.copy(), 1e-2

    def residuals(at: Floats) -> Floats:
        return np.log(law_seconds(demand, at).seconds) - target

    def loss(rest: Floats, at: Floats) -> float:
        huber = 2 * (np.sqrt(1 + (rest / _SPREAD) ** 2) - 1)
        return float(huber.sum() + (((at - prior.mean) / prior.deviation) ** 2).sum())

    rest = residuals(factors)
    now = loss(rest, factors)
    for _ in range(_MAX_STEPS):
        weights = 1 / np.sqrt(1 + (rest / _SPREAD) ** 2) / _SPREAD**2
        slopes = np.stack([(residuals(factors + 1e-4 * unit) - rest) / 1e-4 for unit in np.eye(len(factors))], axis=1)
        gradient = slopes.T @ (weights * rest) + (factors - prior.mean) / prior.deviation**2
        curvature = slopes.T @ (slopes * weights[:, None]) + np.diag(prior.deviation**-2)
        while damping < 1e6:
            step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            there = factors + step.clip(-1.0, 1.0)
            new_rest = residuals(there)
            new = loss(new_rest, there)
            if new < now:
                break
            damping *= 4
        else:
            break
        small = now - new < _ENOUGH * now
        factors, rest, now, damping = there, new_rest, new, max(damping / 4, 1e-6)
        if small:
            break
    return factors
