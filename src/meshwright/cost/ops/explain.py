"""Stage one of the regressor: the work of an op times this device's cost of it, per family of operators.

    t₁ = a · FLOPs / peak + b · bytes / bandwidth + c · kernels · launch          a, b, c > 0

ln a, ln b, ln c are fitted to ln t by Gauss-Newton steps; a normal prior draws them towards 0, the datasheet, so that
few rows, or rows that do not determine one of the three, give reasonable values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.roofline import LAUNCH_S, peak_flops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.prediction import Floats
    from meshwright.cost.work import Amount
    from meshwright.spec import DeviceKind

# Deviation of ln a, ln b, ln c without any rows: a factor of e, as CPUs differ from their datasheets.
_PRIOR = 1.0
_MAX_STEPS = 50
_ENOUGH = 1e-6


def bound_amounts(amounts: Sequence[Amount], kind: DeviceKind, dtype: str) -> Floats:
    """Return the seconds of arithmetic, memory and launches by the datasheet, shape (ops, 3)."""
    rates = (peak_flops(kind, dtype), kind.memory_bandwidth_bytes_per_s, 1.0 / LAUNCH_S)
    columns = np.array([(item.flops, item.num_bytes, item.num_calls) for item in amounts], np.float64)
    bounds: Floats = columns.reshape(-1, 3) / np.array(rates)
    return bounds


def fit_explanation(bounds: Floats, log_seconds: Floats, noise: Floats) -> Floats:
    """Return ln a, ln b, ln c from rows: (rows, 3), (rows,) and the deviation of each row's logarithm (rows,)."""
    weights = 1.0 / noise**2
    factors = np.zeros(3)
    for _ in range(_MAX_STEPS):
        parts = bounds * np.exp(factors)
        total = parts.sum(axis=1)
        slopes = parts / total[:, None]
        gradient = slopes.T @ (weights * (log_seconds - np.log(total))) - factors / _PRIOR**2
        curvature = slopes.T @ (slopes * weights[:, None]) + np.eye(3) / _PRIOR**2
        step = np.linalg.solve(curvature, gradient).clip(-1.0, 1.0)
        factors += step
        if np.abs(step).max() < _ENOUGH:
            break
    return factors


def explain(bounds: Floats, factors: Floats) -> Floats:
    """Return the logarithm of t₁ of each op, shape (ops,)."""
    explained: Floats = np.log((bounds * np.exp(factors)).sum(axis=1))
    return explained
