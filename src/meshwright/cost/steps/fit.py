"""Three figures of a kind of device from measured steps: robust least squares of logarithms, held near a prior.

    minimise  Σ ρ((ln predicted - ln measured) / σ) + Σ ((ln e - ln prior) / τ)²,    ρ(r) = 2·(√(1 + r²) - 1)

by Gauss and Newton with weights 1 / √(1 + r²). The second term keeps a figure that the rows say little about (a table
of large products hardly sees the host) at what was measured apart; ρ lets rows that nothing explains pull less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.steps.prices import Efficiencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.cost.prediction import Floats

# Products run as alone. A decoding step's attention, which only reads, reaches 1732 of 2039 GB/s of an A100
# (ai-dynamo/aiconfigurator, generation_attention_perf). An op of torch takes the host about 10 µs through dispatcher,
# autograd and cudaLaunchKernel, and Python's modules around it as much again.
PRIOR = Efficiencies(product=1.0, memory=0.85, host_s=20e-6)
# A published step is a mean of few figures: about 5 %. What a kernel reaches alone says what it reaches in training to
# about 20 %; hosts differ by more than a factor of two.
_ROW_ERROR, _PRIOR_ERRORS = 0.05, (0.2, 0.2, 1.0)
_ROUNDS, _STEP, _SETTLED = 40, 1e-3, 1e-5


def fit_efficiencies(
    predict: Callable[[Efficiencies], Floats],
    measured: Floats,
    prior: Efficiencies = PRIOR,
    *,
    shares: Floats | None = None,
    start: Efficiencies | None = None,
) -> Efficiencies:
    """The set under which ``predict`` (seconds of shape (rows,)) comes nearest to ``measured`` (same shape).

    ``shares``: how much each row counts, 1 without them. ``start``: where the search begins, at the prior without it.
    """
    held_at = _logarithms(prior)
    now, target = _logarithms(start or prior), np.log(measured)
    held = np.diag(1.0 / np.array(_PRIOR_ERRORS))
    counted = np.sqrt(np.ones(len(measured)) if shares is None else shares)
    for _ in range(_ROUNDS):
        here = np.log(predict(_efficiencies(now)))
        slopes = [(np.log(predict(_efficiencies(now + step))) - here) / _STEP for step in _STEP * np.eye(len(now))]
        rest = (target - here) / _ROW_ERROR
        weight = counted * (1.0 + rest**2) ** -0.25
        rows = np.vstack([weight[:, None] * np.stack(slopes, axis=1) / _ROW_ERROR, held])
        wanted = np.concatenate([weight * rest, held @ (held_at - now)])
        moved = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        now = now + moved
        if np.abs(moved).max() < _SETTLED:
            break
    return _efficiencies(now)


def _logarithms(efficiencies: Efficiencies) -> Floats:
    return np.log([efficiencies.product, efficiencies.memory, efficiencies.host_s])


def _efficiencies(logarithms: Floats) -> Efficiencies:
    product, memory, host_s = np.exp(logarithms).tolist()
    return Efficiencies(product=product, memory=memory, host_s=host_s)
