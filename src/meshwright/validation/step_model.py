"""Predictions of measured steps by one set of efficiencies, how that set is fitted, and what its intervals rest on.

Fitted on (rule written down before any score was looked at): the rows of Narayanan et al. (SC 2021) in 16 bits without
ZeRO, Table 1 and the PTD-P half of Table 2, 16 rows on A100; their seconds follow from hardware FLOPs (eq. 3), full
recompute included. They are other runs of Megatron-LM on the same kind of device than those of Korthikanti et al., with
which they share three sizes of model (175B, 530B, 1T) but no setup. Nothing else is fitted on any row of steps; devices
other than the A100 take the same shares of their datasheets, that of products times what large products alone reach
there over what they reach on an A100 (tables of kernels).

Intervals: those of a paper's or repository's rows come from the residuals of the *others* in their regime, each
counting alike, never from its own; how much of them an interval must hold to hold 80 % of one that is left out is
decided among these others, too. Residuals of the fitted rows are those of whole models left out. The shipped
intervals, for rows that somebody else measured, come from all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.prediction import INTERVAL_SHARE, Basis, Interval, Predictions
from meshwright.cost.steps import PRIOR, StepModel, StepPrices, fit_efficiencies, predict_layer, predict_step
from meshwright.spec import load_cluster
from meshwright.validation.step_rows import row_hash
from meshwright.validation.step_table import read_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.prediction import Floats
    from meshwright.cost.steps import Efficiencies, Regime
    from meshwright.records import Records
    from meshwright.validation.step_rows import StepCase

RULE = "Narayanan et al., SC 2021 (arXiv 2104.04473), Tables 1 and 2, 16 bits, without ZeRO, on A100 80 GB"
FITTED_SOURCE, FITTED_DEVICE = "2104.04473", "A100"
# Ops of a layer's forward below this on average are paced by the host that starts their kernels, which is not modelled.
# Chosen by looking at where vTrain's rows on one node leave the prediction: it decides which interval a row has, and no
# prediction.
_SMALL_OP_S = 1.0e-4
# Products that fill any of the measured devices, as those of training do.
_LARGE_FLOPS, _LARGE_SIZE = 2e11, 1024
# Devices without a table of kernels: best product measured over that of an A100, as shares of their peaks
# (stas00/ml-engineering, achievable matmul: 1745 of 2250 and 271 of 312 TFLOP/s).
_PUBLISHED_RATIOS = {"B200": (1745 / 2250) / (271 / 312)}
# Every origin gives as many residuals as this, at even quantiles, so that 700 rows do not outvote 8.
_RESIDUALS_EACH = 21
# Shares of pooled residuals that an interval may hold; more than 80 % because origins differ among themselves.
_SHARES = (INTERVAL_SHARE, 0.85, 0.9, 0.95, 0.98, 1.0)
# Where nobody else measured in the regime, a factor of two either way: what a roofline is worth at least.
_NOBODY_ELSE = Interval(low=0.5, high=2.0)


def is_fitted(row: Mapping[str, str]) -> bool:
    """Whether a row is one of those that the efficiencies are fitted on, by the rule above."""
    return (
        FITTED_SOURCE in row["source"]
        and row["device"].startswith("A100-80GB")
        and "ZeRO" not in row["zero_or_sharding"]
    )


def predict_case(case: StepCase, model: StepModel) -> float:
    """Seconds of one row's step."""
    return predict_step(case.shape, _prices(case, model), case.software).seconds


def predict_cases(cases: Sequence[StepCase], model: StepModel, residuals: Residuals | None = None) -> Predictions:
    """Seconds of each case's step, shape (cases,), with the interval of its regime: shipped, or from other origins."""
    seconds = np.array([predict_case(case, model) for case in cases])
    regimes = [regime_of(case, model) for case in cases]
    without = {} if residuals is None else {origin: residuals.intervals(origin) for origin in {c.origin for c in cases}}
    chosen = [without.get(case.origin, model.intervals)[regime] for case, regime in zip(cases, regimes, strict=True)]
    basis: tuple[Basis, ...] = tuple("regressed" if regime == "fitted" else "transferred" for regime in regimes)
    return Predictions(
        seconds=seconds,
        low_s=seconds * [interval.low for interval in chosen],
        high_s=seconds * [interval.high for interval in chosen],
        basis=basis,
    )


def regime_of(case: StepCase, model: StepModel) -> Regime:
    """What the interval of a case depends on (`cost.steps.Regime`)."""
    layer = predict_layer(case.shape, _prices(case, model), case.software)
    if layer.forward_s < layer.num_ops * _SMALL_OP_S:
        return "small"
    return "fitted" if case.kind.name == model.device else "elsewhere"


def fit_steps(cases: Sequence[StepCase], model: StepModel) -> Efficiencies:
    """The efficiencies with which the model explains the measured steps of these cases best."""
    measured = np.array([case.measured_s for case in cases], np.float64)

    def predict(tried: Efficiencies) -> Floats:
        trial = replace(model, efficiencies=tried)
        return np.array([predict_case(case, trial) for case in cases])

    return fit_efficiencies(predict, measured)


def measured_shares(kernels: Records) -> dict[str, dict[str, float]]:
    """By device and dtype, the median share of the peak of large products, from a table of measured kernels."""
    shares: dict[str, dict[str, float]] = {}
    products = kernels.where(op="matmul")
    for device, dtype in sorted(set(zip(products.device, products.dtype, strict=True))):
        kind = load_cluster(device).device_kinds[0]
        mine = products.where(device=device, dtype=dtype)
        sizes = np.stack([mine.size(name) for name in ("m", "n", "k")]).astype(np.float64)
        flops = 2 * sizes.prod(axis=0)
        large = (flops >= _LARGE_FLOPS) & (sizes.min(axis=0) >= _LARGE_SIZE)
        if dtype in kind.peak_flops_per_s and large.any():
            rate = float(np.median(flops[large] / mine.seconds[large]))
            shares.setdefault(device, {})[dtype] = rate / kind.peak_flops_per_s[dtype]
    for device, ratio in _PUBLISHED_RATIOS.items():
        shares.setdefault(device, {"bfloat16": ratio * shares[FITTED_DEVICE]["bfloat16"]})
    return shares


def fit_model(rows: Sequence[Mapping[str, str]], kernels: Records) -> StepModel:
    """The model that ships: fitted on the rows of the rule, intervals from all rows, shares from ``kernels``."""
    mine = [row for row in rows if is_fitted(row)]
    fitted = read_steps(mine)[0]
    model = StepModel(
        device=FITTED_DEVICE,
        rule=RULE,
        efficiencies=PRIOR,
        product_shares=measured_shares(kernels),
        intervals={},
        fitted_rows=tuple(f"{row_hash(row):016x}" for row in mine),
    )
    model = replace(model, efficiencies=fit_steps(fitted, model))
    others = read_steps([row for row in rows if not is_fitted(row)])[0]
    return replace(
        model, intervals=Residuals(fitted, predict_left_out(fitted, fitted, model), others, model).intervals()
    )


def predict_left_out(asked: Sequence[StepCase], fitted: Sequence[StepCase], model: StepModel) -> Floats:
    """Seconds of each asked case by the fit to those cases that have another size of model, shape (asked,)."""
    seconds = np.empty(len(asked))
    for size in sorted({_size_of(case) for case in asked}):
        rest = [case for case in fitted if _size_of(case) != size]
        without = replace(model, efficiencies=fit_steps(rest, model))
        for index, case in enumerate(asked):
            if _size_of(case) == size:
                seconds[index] = predict_case(case, without)
    return seconds


def _size_of(case: StepCase) -> tuple[int, int]:
    return case.shape.layers, case.shape.hidden


class Residuals:
    """Measured over predicted, by origin and regime: what intervals are made of.

    ``left_out_s``: of the fitted cases, what `predict_left_out` says, shape (fitted,).
    """

    def __init__(
        self, fitted: Sequence[StepCase], left_out_s: Floats, others: Sequence[StepCase], model: StepModel
    ) -> None:
        self._ratios: dict[Regime, dict[str, list[tuple[float, float]]]] = {
            "fitted": defaultdict(list),
            "elsewhere": defaultdict(list),
            "small": defaultdict(list),
        }
        seconds = [*left_out_s, *(predict_case(case, model) for case in others)]
        for case, predicted in zip((*fitted, *others), seconds, strict=True):
            if case.measured_s is not None:
                self._ratios[regime_of(case, model)][case.origin].append((case.measured_s, float(predicted)))

    def intervals(self, without: str = "") -> dict[Regime, Interval]:
        """The interval of each regime from all origins but one."""
        return {
            regime: _interval([_thinned(rows) for origin, rows in sorted(origins.items()) if origin != without])
            for regime, origins in self._ratios.items()
        }


def _thinned(rows: Sequence[tuple[float, float]]) -> Floats:
    """Logarithms of measured over predicted at even quantiles, shape (residuals each,)."""
    logarithms = [math.log(measured / predicted) for measured, predicted in rows]
    return np.quantile(logarithms, (np.arange(_RESIDUALS_EACH) + 0.5) / _RESIDUALS_EACH)


def _interval(origins: Sequence[Floats]) -> Interval:
    """The narrowest share of all residuals whose like, from all origins but one, holds 80 % of that one on average."""
    if not origins:
        return _NOBODY_ELSE
    for share in _SHARES:
        held = [_held(origin, _ends([*origins[:i], *origins[i + 1 :]], share)) for i, origin in enumerate(origins)]
        if len(origins) == 1 or np.mean(held) >= INTERVAL_SHARE:
            break
    low, high = np.exp(_ends(origins, share)).tolist()
    return Interval(low=low, high=high)


def _ends(origins: Sequence[Floats], share: float) -> Floats:
    together = np.concatenate(origins) if origins else np.zeros(1)
    return np.quantile(together, [(1 - share) / 2, (1 + share) / 2])


def _held(origin: Floats, ends: Floats) -> float:
    return float(((ends[0] <= origin) & (origin <= ends[1])).mean())


def _prices(case: StepCase, model: StepModel) -> StepPrices:
    return StepPrices(
        kind=case.kind,
        node=case.node,
        setup=case.setup,
        efficiencies=model.efficiencies,
        product_scales=model.product_scales(case.kind.name),
        attention_share=case.software.attention_share.get(case.kind.name),
    )
