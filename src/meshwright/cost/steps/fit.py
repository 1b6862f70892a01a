"""Three efficiencies from measured steps: least squares of logarithms, held near what single kernels reach.

    minimise  Σ ((ln predicted - ln measured) / σ)² + Σ ((ln e - ln prior) / τ)²       by Gauss and Newton

The second term keeps a share that the rows say little about (a table of compute-bound steps hardly sees the network)
at what was measured apart. It is the posterior mode for errors of σ and a prior of τ, both relative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.steps.prices import Efficiencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.cost.prediction import Floats

# Matrix products of an A100 reach 271 of 312 TFLOP/s (stas00/ml-engineering, achievable matmul). Attention of a
# decoding step, which only reads, reaches 1732 of 2039 GB/s, and an all-reduce of 8 A100 grows by 231 of 300 GB/s
# between 16 and 64 MiB (both ai-dynamo/aiconfigurator: generation_attention_perf; nccl_perf, NCCL 2.27).
PRIOR = Efficiencies(product=0.87, memory=0.85, network=0.77)
# A published step is a mean of few figures: about 5 %. What a kernel reaches alone says what it reaches in training to
# about 20 %.
_ROW_ERROR, _PRIOR_ERROR = 0.05, 0.2
_ROUNDS, _STEP = 8, 1e-3


def fit_efficiencies(predict: Callable[[Efficiencies], Floats], measured: Floats) -> Efficiencies:
    """The set under which ``predict`` (seconds of shape (rows,)) comes nearest to ``measured`` (same shape)."""
    prior = _logarithms(PRIOR)
    now, target = prior.copy(), np.log(measured)
    for _ in range(_ROUNDS):
        here = np.log(predict(_efficiencies(now)))
        slopes = [(np.log(predict(_efficiencies(now + step))) - here) / _STEP for step in _STEP * np.eye(len(now))]
        rows = np.vstack([np.stack(slopes, axis=1) / _ROW_ERROR, np.eye(len(now)) / _PRIOR_ERROR])
        wanted = np.concatenate([(target - here) / _ROW_ERROR, (prior - now) / _PRIOR_ERROR])
        now = now + np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return _efficiencies(now)


def _logarithms(efficiencies: Efficiencies) -> Floats:
    return np.log([efficiencies.product, efficiencies.memory, efficiencies.network])


def _efficiencies(logarithms: Floats) -> Efficiencies:
    product, memory, network = np.exp(logarithms).tolist()
    return Efficiencies(product=product, memory=memory, network=network)
