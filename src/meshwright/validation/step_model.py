"""Predictions of measured steps by one set of efficiencies per kind of device, its fit, and what intervals rest on.

Fitted on the calibration rows of `step_split`, drawn and committed before the first fit: at most a tenth of each kind's
rows on one node. Papers and repositories count alike among them, however many rows they have. The A100 has most (77);
H100 and V100 are held near its set, for they have one and two. Nothing else is fitted on any row of steps; kinds
without rows take the set of another (`StepModel.stand_ins`). In which regime a row is follows from the prediction.

Intervals: those of a paper's or repository's rows come from the residuals of the *others* in their regime and from its
own calibration rows, each origin counting alike, never from its own scored rows; how much of them an interval must hold
to hold 80 % of one that is left out is decided among these, too. The shipped intervals, for rows that somebody else
measured, come from all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.prediction import INTERVAL_SHARE, Basis, Interval, Predictions
from meshwright.cost.residual import ResidualShape
from meshwright.cost.steps import PRIOR, StepModel, StepPrices, fit_efficiencies, predict_layer, predict_step
from meshwright.validation.pipeline_programs import simulated_seconds
from meshwright.validation.step_rows import row_hash
from meshwright.validation.step_split import calibration_rows
from meshwright.validation.step_table import read_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.prediction import Floats
    from meshwright.cost.steps import Efficiencies, Regime
    from meshwright.validation.datasets import StepRow
    from meshwright.validation.step_rows import StepCase

RULE = "at most a tenth of each kind's rows on one node (splits/steps_*.json), each paper or repository counting alike"
FITTED_DEVICE = "A100"
# Kinds without rows: the other device of the same multiprocessors, the generation before, the same arithmetic.
STAND_INS = {"H200": "H100", "B200": "H100", "L40S": "A100"}
# Every origin gives as many residuals as this, at even quantiles, so that 700 rows do not outvote 8.
_RESIDUALS_EACH = 21
# Shares of pooled residuals that an interval may hold; more than 80 % because origins differ among themselves.
_SHARES = (INTERVAL_SHARE, 0.85, 0.9, 0.95, 0.98, 1.0)
# Rows whose source leaves out what decides their time are reported apart, and say nothing of other rows: ZeRO-3 of
# 2021, of which it is not said what DeepSpeed gathered beside what; what Alpa's search made of models that are no GPT.
UNDERSPECIFIED_ZERO = ("sc21-t2-ZeRO",)
UNDERSPECIFIED_PLANS = tuple(
    f"alpa-node-{model}-{count}-auto_sharding" for model in ("wresnet", "moe") for count in (2, 4, 8)
)
UNDERSPECIFIED = UNDERSPECIFIED_ZERO + UNDERSPECIFIED_PLANS
# Where nobody else measured in the regime, a factor of two either way: what a roofline is worth at least.
_NOBODY_ELSE = Interval(low=0.5, high=2.0)


def predict_case(case: StepCase, model: StepModel) -> float:
    """Seconds of one row's step, simulated as a Program."""
    return _simulate(case, _prices(case, model.efficiencies_of(case.kind.name)))


def predict_by_datasheet(case: StepCase) -> float:
    """Seconds of one row's step at the rates of the datasheet: nothing fitted, no measured kernel, no host."""
    prices = replace(_prices(case, PRIOR), efficiencies=replace(PRIOR, memory=1.0, host_s=0.0), by_datasheet=True)
    return _simulate(case, prices)


def predict_cases(
    cases: Sequence[StepCase], model: StepModel, residuals: Residuals | None = None, known_s: Sequence[float] = ()
) -> Predictions:
    """Seconds of each case's step, shape (cases,), with the interval of its regime: shipped, or from other origins.

    ``known_s``: what `predict_case` said of each, shape (cases,), where it was asked before.
    """
    seconds = np.array(known_s or [predict_case(case, model) for case in cases])
    regimes = [regime_of(case, model) for case in cases]
    without = {} if residuals is None else {origin: residuals.intervals(origin) for origin in {c.origin for c in cases}}
    chosen = [without.get(case.origin, model.intervals)[regime] for case, regime in zip(cases, regimes, strict=True)]
    basis: tuple[Basis, ...] = tuple(
        "regressed" if case.kind.name in model.efficiencies else "transferred" for case in cases
    )
    return Predictions(
        seconds=seconds,
        low_s=seconds * [interval.low for interval in chosen],
        high_s=seconds * [interval.high for interval in chosen],
        basis=basis,
    )


def regime_of(case: StepCase, model: StepModel) -> Regime:
    """What the interval of a case depends on (`cost.steps.Regime`)."""
    if isinstance(case.shape, ResidualShape):
        return "convolutions"
    layer = predict_layer(case.shape, _prices(case, model.efficiencies_of(case.kind.name)), case.software)
    if layer.host_s > layer.device_s:
        return "small"
    return "fitted" if case.kind.name == model.device else "elsewhere"


def fit_steps(cases: Sequence[StepCase], prior: Efficiencies, start: Efficiencies | None = None) -> Efficiencies:
    """The set with which the model explains the measured steps of these cases best, origins counting alike."""
    measured = np.array([case.measured_s for case in cases], np.float64)

    def predict(tried: Efficiencies) -> Floats:
        return np.array([_simulate(case, _prices(case, tried)) for case in cases])

    return fit_efficiencies(predict, measured, prior, shares=count_alike(cases), start=start)


def count_alike(cases: Sequence[StepCase]) -> Floats:
    """How much each case counts, shape (cases,), where origins count alike; 1 on average."""
    counts = Counter(case.origin for case in cases)
    return np.array([len(cases) / len(counts) / counts[case.origin] for case in cases])


def fit_kinds(rows: Sequence[StepRow], start: StepModel | None = None) -> dict[str, Efficiencies]:
    """The set of each kind of device that has calibration rows; ``start``: a model near which they lie."""
    cases = read_steps(calibration_rows(rows))[0]
    found: dict[str, Efficiencies] = {}
    for kind in sorted({case.kind.name for case in cases}, key=lambda name: name != FITTED_DEVICE):
        mine = [case for case in cases if case.kind.name == kind]
        near = None if start is None else start.efficiencies[kind]
        found[kind] = fit_steps(mine, found.get(FITTED_DEVICE, PRIOR), near)
    return found


def fit_model(rows: Sequence[StepRow]) -> StepModel:
    """The model that ships: fitted on the calibration rows among all published ones, intervals from all rows."""
    mine = calibration_rows(rows)
    hashes = tuple(f"{row_hash(row):016x}" for row in mine)
    model = StepModel(
        device=FITTED_DEVICE,
        rule=RULE,
        efficiencies=fit_kinds(rows),
        stand_ins=STAND_INS,
        intervals={},
        fitted_rows=hashes,
    )
    others = [row for row in rows if row["iter_time_s"] and f"{row_hash(row):016x}" not in set(hashes)]
    residuals = Residuals(read_steps(mine)[0], read_steps(others)[0], model)
    return replace(model, intervals=residuals.intervals())


class Residuals:
    """Measured over predicted, by origin and regime: what intervals are made of.

    Of an origin that has rows among the ``fitted`` ones, these stand for all of its rows where its own are asked for.
    """

    def __init__(self, fitted: Sequence[StepCase], others: Sequence[StepCase], model: StepModel) -> None:
        self._fitted = _ratios(fitted, model)
        self._all = _ratios([*fitted, *others], model)

    def intervals(self, without: str = "") -> dict[Regime, Interval]:
        """The interval of each regime from all origins, of one of which only the fitted rows are looked at."""
        return {regime: self._interval(regime, without) for regime in self._all}

    def _interval(self, regime: Regime, without: str) -> Interval:
        groups = [rows for origin, rows in sorted(self._all[regime].items()) if origin != without]
        own = self._fitted[regime].get(without)
        return _interval([_thinned(rows) for rows in (*groups, *([own] if own else []))])


def _ratios(cases: Sequence[StepCase], model: StepModel) -> dict[Regime, dict[str, list[float]]]:
    """Logarithms of measured over predicted, by regime and origin."""
    found: dict[Regime, dict[str, list[float]]] = {
        "fitted": defaultdict(list),
        "elsewhere": defaultdict(list),
        "small": defaultdict(list),
        "convolutions": defaultdict(list),
    }
    for case in cases:
        if case.measured_s is not None and not case.row_id.startswith(UNDERSPECIFIED):
            ratio = math.log(case.measured_s / predict_case(case, model))
            found[regime_of(case, model)][case.origin].append(ratio)
    return found


def _thinned(logarithms: Sequence[float]) -> Floats:
    """At even quantiles, shape (residuals each,)."""
    return np.quantile(logarithms, (np.arange(_RESIDUALS_EACH) + 0.5) / _RESIDUALS_EACH)


def _interval(origins: Sequence[Floats]) -> Interval:
    """The narrowest share of all residuals whose like, from all origins but one, holds 80 % of that one on average.

    The prediction itself lies in it.
    """
    if not origins:
        return _NOBODY_ELSE
    for share in _SHARES:
        held = [_held(origin, _ends([*origins[:i], *origins[i + 1 :]], share)) for i, origin in enumerate(origins)]
        if len(origins) == 1 or np.mean(held) >= INTERVAL_SHARE:
            break
    low, high = np.exp(_ends(origins, share)).tolist()
    return Interval(low=min(low, 1.0), high=max(high, 1.0))


def _ends(origins: Sequence[Floats], share: float) -> Floats:
    together = np.concatenate(origins) if origins else np.zeros(1)
    return np.quantile(together, [(1 - share) / 2, (1 + share) / 2])


def _held(origin: Floats, ends: Floats) -> float:
    return float(((ends[0] <= origin) & (origin <= ends[1])).mean())


def _simulate(case: StepCase, prices: StepPrices) -> float:
    step, setup = predict_step(case.shape, prices, case.software), case.setup
    blocking = case.software.blocking_messages
    return simulated_seconds(step, setup.num_microbatches, setup.schedule, setup.chunks, blocking=blocking)


def _prices(case: StepCase, efficiencies: Efficiencies) -> StepPrices:
    return StepPrices(
        kind=case.kind,
        node=case.node,
        setup=case.setup,
        efficiencies=efficiencies,
        attention_share=case.software.attention_share.get(case.kind.name),
    )
