"""How often to save? The interval of work that loses least time, and the time that is to be expected.

Failures come at random with a mean of M seconds between them, and saving takes C seconds:

    young     √(2 C M)                                          Young, CACM 17 (9), 1974
    daly      √(2 C M) (1 + √(C / 2M) / 3 + C / 18 M) - C,      Daly, FGCS 22 (3), 2006
              or M from C = 2 M on
    best      the τ that makes the expected time shortest: M (1 + W(-e^(-1 - C/M))), W being Lambert's function;
              the derivative of e^((τ + C)/M) / τ - 1 / τ is zero there

The expected time of T seconds of work, saved every τ, with R seconds to go on after a failure, failures while saving
and going on included (Daly):   M e^(R/M) (e^((τ + C)/M) - 1) T / τ. Repairs are part of R (`failures`).
"""

from __future__ import annotations

import math

# Of so many mean times, saving takes so long that the best interval is the mean time, but for 1e-13 of it.
_LONG_SAVE = 30.0


def young_interval(save_s: float, mttf_s: float) -> float:
    """Young's first-order interval in seconds of work."""
    return math.sqrt(2 * save_s * mttf_s)


def daly_interval(save_s: float, mttf_s: float) -> float:
    """Daly's higher-order interval."""
    if save_s >= 2 * mttf_s:
        return mttf_s
    ratio = save_s / (2 * mttf_s)
    return young_interval(save_s, mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def best_interval(save_s: float, mttf_s: float) -> float:
    """The interval with the shortest expected time, by Newton's method for x = τ / M in (1 - x) e^(x + C/M) = 1."""
    ratio = save_s / mttf_s
    if ratio > _LONG_SAVE:
        return mttf_s
    x = min(math.sqrt(2 * ratio), 0.999999)
    for _ in range(100):
        # log(1 - x) + x + C/M falls from C/M at 0 to -∞ at 1.
        step = (math.log1p(-x) + x + ratio) / (x / (1 - x))
        x = min(max(x + step, x / 2), (1 + x) / 2)
        if abs(step) < 1e-14 * x:
            break
    return x * mttf_s


def expected_seconds(work_s: float, interval_s: float, save_s: float, restart_s: float, mttf_s: float) -> float:
    """The expected time of a long run; infinite where no interval without a failure can be hoped for, or none is."""
    if math.isinf(interval_s):
        return math.inf
    try:
        growth = math.exp(restart_s / mttf_s) * math.expm1((interval_s + save_s) / mttf_s)
    except OverflowError:
        return math.inf
    return mttf_s * growth * work_s / interval_s
