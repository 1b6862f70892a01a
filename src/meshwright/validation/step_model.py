"""Predictions of measured steps by one set of efficiencies, how that set is fitted, and what its intervals rest on.

Fitted on (rule written down before any score was looked at): the rows of Narayanan et al. (SC 2021) in 16 bits without
ZeRO, Table 1 and the PTD-P half of Table 2, 16 rows on A100; their seconds follow from hardware FLOPs (eq. 3), full
recompute included. They are other runs of Megatron-LM on the same kind of device than those of Korthikanti et al., with
which they share three sizes of model (175B, 530B, 1T) but no setup. Nothing else is fitted on any row of steps; devices
other than the A100 take the same shares of their own datasheets.

Intervals: those of a source come from the residuals of the *other* sources in its regime, every source counting alike,
never from its own rows. Residuals of the fitted rows are those of whole models left out. The shipped intervals, for
rows of a new source, come from all sources.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.prediction import Basis, Interval, Predictions, fit_interval
from meshwright.cost.steps import StepModel, StepPrices, fit_efficiencies, predict_layer, predict_step
from meshwright.validation.step_rows import read_steps, row_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.prediction import Floats
    from meshwright.cost.steps import Efficiencies, Regime
    from meshwright.validation.step_rows import StepCase

RULE = "Narayanan et al., SC 2021 (arXiv 2104.04473), Tables 1 and 2, 16 bits, without ZeRO, on A100 80 GB"
FITTED_SOURCE, FITTED_DEVICE = "2104.04473", "A100"
# Ops of a layer's forward below this on average are paced by the host that starts their kernels, which is not modelled.
# Chosen by looking at where vTrain's rows on one node leave the prediction: it decides which interval a row has, and no
# prediction.
_SMALL_OP_S = 1.0e-4
# Every source gives as many residuals as this, at even quantiles, so that 700 rows do not outvote 8.
_RESIDUALS_PER_SOURCE = 21
# Without another source in the regime, a factor of two either way: what a roofline is worth at least.
_NO_SOURCE = Interval(low=0.5, high=2.0)


def is_fitted(row: Mapping[str, str]) -> bool:
    """Whether a row is one of those that the efficiencies are fitted on, by the rule above."""
    return (
        FITTED_SOURCE in row["source"]
        and row["device"].startswith("A100-80GB")
        and "ZeRO" not in row["zero_or_sharding"]
    )


def predict_case(case: StepCase, efficiencies: Efficiencies) -> float:
    """Seconds of one row's step."""
    return predict_step(case.shape, _prices(case, efficiencies), case.software, case.schedule).seconds


def predict_cases(
    cases: Sequence[StepCase], model: StepModel, intervals: Mapping[Regime, Interval] | None = None
) -> Predictions:
    """Seconds of each case's step, shape (cases,), with the interval of its regime (a shipped one unless given)."""
    seconds = np.array([predict_case(case, model.efficiencies) for case in cases])
    regimes = [regime_of(case, model) for case in cases]
    chosen = [model.intervals[regime] if intervals is None else intervals[regime] for regime in regimes]
    basis: tuple[Basis, ...] = tuple("regressed" if regime == "fitted" else "transferred" for regime in regimes)
    return Predictions(
        seconds=seconds,
        low_s=seconds * [interval.low for interval in chosen],
        high_s=seconds * [interval.high for interval in chosen],
        basis=basis,
    )


def regime_of(case: StepCase, model: StepModel) -> Regime:
    """What the interval of a case depends on (`cost.steps.Regime`)."""
    layer = predict_layer(case.shape, _prices(case, model.efficiencies), case.software)
    if layer.forward_s < layer.num_ops * _SMALL_OP_S:
        return "small"
    return "fitted" if case.kind.name == model.device else "elsewhere"


def fit_steps(cases: Sequence[StepCase]) -> Efficiencies:
    """The efficiencies that explain the measured steps of these cases best."""
    measured = np.array([case.measured_s for case in cases], np.float64)
    return fit_efficiencies(lambda tried: np.array([predict_case(case, tried) for case in cases]), measured)


def fit_model(rows: Sequence[Mapping[str, str]]) -> StepModel:
    """The model that ships: fitted on the rows of the rule, its intervals from all rows."""
    mine = [row for row in rows if is_fitted(row)]
    fitted = read_steps(mine)[0]
    model = StepModel(
        device=FITTED_DEVICE,
        rule=RULE,
        efficiencies=fit_steps(fitted),
        intervals={},
        fitted_rows=tuple(f"{row_hash(row):016x}" for row in mine),
    )
    others = read_steps([row for row in rows if not is_fitted(row)])[0]
    return replace(model, intervals=Residuals(fitted, others, model).intervals())


def predict_left_out(cases: Sequence[StepCase]) -> Floats:
    """Seconds of each case by the fit to the cases of the other models, shape (cases,)."""
    sizes = [(case.shape.layers, case.shape.hidden) for case in cases]
    seconds = np.empty(len(cases))
    for size in sorted(set(sizes)):
        efficiencies = fit_steps([case for case, other in zip(cases, sizes, strict=True) if other != size])
        for index in (i for i, other in enumerate(sizes) if other == size):
            seconds[index] = predict_case(cases[index], efficiencies)
    return seconds


class Residuals:
    """Measured over predicted, by source and regime: what intervals are made of."""

    def __init__(self, fitted: Sequence[StepCase], others: Sequence[StepCase], model: StepModel) -> None:
        self._ratios: dict[Regime, dict[str, list[tuple[float, float]]]] = {
            "fitted": defaultdict(list),
            "elsewhere": defaultdict(list),
            "small": defaultdict(list),
        }
        seconds = [*predict_left_out(fitted), *(predict_case(case, model.efficiencies) for case in others)]
        for case, predicted in zip((*fitted, *others), seconds, strict=True):
            if case.measured_s is not None:
                self._ratios[regime_of(case, model)][case.source].append((case.measured_s, float(predicted)))

    def intervals(self, without: str = "") -> dict[Regime, Interval]:
        """The interval of each regime from all sources but one."""
        return {regime: self._interval(sources, without) for regime, sources in self._ratios.items()}

    def _interval(self, sources: Mapping[str, list[tuple[float, float]]], without: str) -> Interval:
        ratios = [
            np.quantile([math.log(measured / predicted) for measured, predicted in rows], _even(_RESIDUALS_PER_SOURCE))
            for source, rows in sorted(sources.items())
            if source != without
        ]
        if not ratios:
            return _NO_SOURCE
        together = np.exp(np.concatenate(ratios))
        return fit_interval(together, np.ones_like(together))


def _even(count: int) -> Floats:
    return (np.arange(count) + 0.5) / count


def _prices(case: StepCase, efficiencies: Efficiencies) -> StepPrices:
    return StepPrices(
        kind=case.kind,
        node=case.node,
        setup=case.setup,
        efficiencies=efficiencies,
        attention_share=case.software.attention_share.get(case.kind.name),
    )
