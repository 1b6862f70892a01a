"""Seconds of unmeasured ops, learned from measured ops of the same device (`fit_op_regressor`), in two stages.

Stage one (`fit_explanation`) estimates the time t₁ of a pass (forward, backward or accumulate) of an op from its work,
for each family of operators. Stage two estimates ln (t / t₁) = f(op) by a Gaussian process over the logarithms x of the
op's sizes and bytes, within the family:

    cov(f, f') = (1 + [same operator] + [same variant]) · (v + w · M(|x - x'| / l)),     M: the Matérn 3/2 function

So an op with sizes close to measured ops is estimated from these; an op with other sizes from its operator; an op of an
unmeasured operator from its family. The noise of a row is its measured spread and the variation of timing in a model.

The interval is t · exp(±q·s). s is the deviation of the process. q is the quantile of |residual| / s over all rows of
the table, each predicted without itself, or without its relatives (the same op at other batch sizes) if that q is
larger. The inverse covariance gives both at once.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.2 and 5.4.2 (leaving out, here whole blocks).
v, w, l and the noise were chosen by holding out one model after the other among those that `validation.cpu_ops` does
not score; l from 3 to 20 and noises from 0.05 to 0.3 move the median error by less than 3 points.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.costs import INTERVAL_SHARE, Basis, Floats, OpCost, Predictions
from meshwright.cost.kernels import is_tiled
from meshwright.cost.roofline import LAUNCH_S, RooflineSeconds, peak_flops
from meshwright.cost.work import Amount, Family, OpWork, read_work, relatives
from meshwright.spec import DeviceKind, OpMeasurement

# Deviation of ln a, ln b, ln c without any rows: a factor of e, as CPUs differ from their datasheets.
_PRIOR = 1.0
_MAX_STEPS = 50
_ENOUGH = 1e-6


def bound_amounts(amounts: Sequence[Amount], kind: DeviceKind, dtype: str) -> Floats:
    """Return the datasheet's seconds of arithmetic, memory traffic and launches for each amount, shape (ops, 3)."""
    rates = (peak_flops(kind, dtype), kind.memory_bandwidth_bytes_per_s, 1.0 / LAUNCH_S)
    columns = np.array([(item.flops, item.num_bytes, item.num_calls) for item in amounts], np.float64)
    bounds: Floats = columns.reshape(-1, 3) / np.array(rates)
    return bounds


# The work of an op times this device's cost of it, per family of operators:
#
#     t₁ = a · FLOPs / peak + b · bytes / bandwidth + c · kernels · launch          a, b, c > 0
#
# ln a, ln b, ln c are fitted to ln t by Gauss-Newton steps. A normal prior draws them towards 0, the datasheet, so that
# few rows, or rows that do not determine one of the three, give reasonable values.
def fit_explanation(bounds: Floats, log_seconds: Floats, noise: Floats) -> Floats:
    """Return the factors ln a, ln b, ln c, shape (3,), fitted to measured rows.

    ``bounds``: `bound_amounts` of the rows, shape (rows, 3). ``log_seconds``: shape (rows,). ``noise``: standard
    deviation of each row's logarithm, shape (rows,).
    """
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
    """Return ln t₁ of each op, shape (ops,), from `bound_amounts` and the factors of `fit_explanation`."""
    explained: Floats = np.log((bounds * np.exp(factors)).sum(axis=1))
    return explained


Pass = Literal["forward", "backward", "accumulate"]
PASSES: tuple[Pass, ...] = get_args(Pass)
Describe = Callable[[str], OpWork | None]

# v, w, l (in doublings of a size) and the deviation of ln t between two measurements of one op in different models.
_SHARED, _ALIKE, _SCALE, _NOISE = 0.3, 1.0, 12.0, 0.2
_PRIOR_DEVIATION = math.sqrt(3.0 * (_SHARED + _ALIKE) + _NOISE**2)
# The fewest forwards of a family on a GPU; a shipped predictor (`cost.kernels`) estimates ops of smaller families.
_MIN_ON_GPUS = 4
# The deviation of ln t that the explanation leaves: rows count almost equally in its fit, however precise they are.
_UNEXPLAINED = 0.5
# Twice the cost of reading the clock (`measurement.clocks`): shorter times are noise.
_RESOLUTION_S = 2e-7
# A day: no op takes this long, so such a row is ignored.
_MOST_S = 86_400.0
# The spread is (p90 - p10) / median: 2.56 deviations of a normal distribution.
_SPREAD_DEVIATIONS = 2.56
# The quantile of a normal deviation that contains INTERVAL_SHARE; used with too few rows for a quantile of their own.
_NORMAL_QUANTILE = 1.28
_BASIS: tuple[Basis] = ("regressed",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Points:
    """Ops of one family as points: ``places`` of shape (ops, 5), ``bounds`` (ops, 3), operators and variants (ops,)."""

    places: Floats
    bounds: Floats
    operators: NDArray[np.str_]
    variants: NDArray[np.str_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Process:
    """A fitted family: its points, ln a, ln b, ln c, and the process's inverse covariance and weights."""

    points: _Points
    factors: Floats
    inverse: Floats
    weights: Floats

    def predict(self, points: _Points) -> tuple[Floats, Floats]:
        """Return logarithms of seconds and their deviations, each of shape (ops,)."""
        shared = _covariance(points, self.points)
        explained = ((shared @ self.inverse) * shared).sum(axis=1)
        variance = _PRIOR_DEVIATION**2 - explained
        return explain(points.bounds, self.factors) + shared @ self.weights, np.sqrt(variance)

    def left_out(self, names: Sequence[str]) -> Floats:
        """Return |residual| / deviation of each row, predicted without the rows of the same name; shape (rows,)."""
        blocks: defaultdict[str, list[int]] = defaultdict(list)
        for place, name in enumerate(names):
            blocks[name].append(place)
        ratios: Floats = np.abs(self.weights) / np.sqrt(np.diag(self.inverse))
        for block in blocks.values():
            if len(block) == 1:
                continue
            covariance = np.linalg.inv(self.inverse[np.ix_(block, block)])
            ratios[block] = np.abs(covariance @ self.weights[block]) / np.sqrt(np.diag(covariance))
        return ratios


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpRegressor:
    """A predictor of the seconds of ops by their keys, made by `fit_op_regressor`.

    ``processes``: the fit by pass (forward, backward, accumulate) and family of operators. ``quantiles``: the quantile
    q of each pass, for intervals. ``describe``: the function that returns the work of a key, usually `read_work`.
    """

    kind: DeviceKind
    dtype: str
    processes: dict[tuple[Pass, Family], _Process]
    quantiles: dict[Pass, float]
    describe: Describe = read_work

    def knows(self, key: str) -> bool:
        """Return whether the op with this key can be predicted: an op of its family was measured in its dtype."""
        work = self.describe(key)
        return work is not None and work.dtype in ("", self.dtype) and ("forward", work.family) in self.processes

    def predict(self, keys: Sequence[str], part: Pass) -> Predictions:
        """Return the seconds of one pass of each op, by key; 0 for an op without this pass.

        All keys must be of ops for which `knows` is true.
        """
        works = [work for work in map(self.describe, keys) if work is not None]
        seconds, low, high = np.zeros(len(works)), np.zeros(len(works)), np.zeros(len(works))
        for family in {work.family for work in works}:
            rows = [i for i, work in enumerate(works) if work.family == family and _amount(work, part).num_calls]
            if rows:
                logs, deviations = self._logs(
                    _place([works[i] for i in rows], part, self.kind, self.dtype), part, family
                )
                around = self.quantiles.get(part, _NORMAL_QUANTILE) * deviations
                seconds[rows], low[rows], high[rows] = np.exp([logs, logs - around, logs + around])
        return Predictions(seconds=seconds, low_s=low, high_s=high, basis=_BASIS * len(works))

    def estimate(self, key: str) -> OpCost:
        """Return the cost of one op, for which `knows` must be true: forward, backward and accumulate."""
        parts = [self.predict((key,), part) for part in PASSES]
        seconds, low, high = (
            RooflineSeconds(
                **{f"{part}_s": float(getattr(found, end)[0]) for part, found in zip(PASSES, parts, strict=True)}
            )
            for end in ("seconds", "low_s", "high_s")
        )
        return OpCost(seconds=seconds, low=low, high=high, basis="regressed")

    def _logs(self, points: _Points, part: Pass, family: Family) -> tuple[Floats, Floats]:
        process = self.processes.get((part, family))
        if process is not None:
            return process.predict(points)
        # Only the forward of this family was measured: use the datasheet with the process's prior deviation.
        return explain(points.bounds, np.zeros(3)), np.full(len(points.bounds), _PRIOR_DEVIATION)


def fit_op_regressor(
    rows: Sequence[OpMeasurement], kind: DeviceKind, dtype: str, describe: Describe = read_work
) -> OpRegressor:
    """Return a regressor fitted to measured ops of one device, in ``dtype`` or without floating-point inputs.

    ``describe``: the function that returns the work of a key, or None for keys to skip.
    """
    processes: dict[tuple[Pass, Family], _Process] = {}
    quantiles: dict[Pass, float] = {}
    for part in PASSES:
        families: defaultdict[Family, list[tuple[OpWork, OpMeasurement]]] = defaultdict(list)
        for row in rows:
            work = describe(row.key)
            if work is None or work.dtype not in ("", dtype) or not _RESOLUTION_S < _seconds(row, part) < _MOST_S:
                continue
            if _amount(work, part).num_calls:
                families[work.family].append((work, row))
        least = _MIN_ON_GPUS if part == "forward" and is_tiled(kind) else 1
        alone, apart = [np.zeros(0)], [np.zeros(0)]
        for family, known in families.items():
            if len(known) < least:
                continue
            process, names = _fit_family(known, part, kind, dtype), [row.key for _, row in known]
            processes[part, family] = process
            alone.append(process.left_out(names))
            apart.append(process.left_out([relatives(name) for name in names]))
        if len(alone) > 1:
            quantiles[part] = max(_quantile(np.concatenate(ratios)) for ratios in (alone, apart))
    return OpRegressor(kind=kind, dtype=dtype, processes=processes, quantiles=quantiles, describe=describe)


def _fit_family(known: list[tuple[OpWork, OpMeasurement]], part: Pass, kind: DeviceKind, dtype: str) -> _Process:
    points = _place([work for work, _ in known], part, kind, dtype)
    logs = np.log([_seconds(row, part) for _, row in known])
    noise = np.hypot(_NOISE, np.minimum([row.spread for _, row in known], _SPREAD_DEVIATIONS) / _SPREAD_DEVIATIONS)
    factors = fit_explanation(points.bounds, logs, np.hypot(noise, _UNEXPLAINED))
    inverse = np.asarray(np.linalg.inv(_covariance(points, points) + np.diag(noise**2)), np.float64)
    return _Process(
        points=points, factors=factors, inverse=inverse, weights=inverse @ (logs - explain(points.bounds, factors))
    )


def _quantile(ratios: Floats) -> float:
    """Return the ⌈(n + 1) · share⌉-th smallest, as in split conformal prediction; the largest if rows are too few."""
    place = math.ceil((len(ratios) + 1) * INTERVAL_SHARE)
    if place > len(ratios):
        return max(_NORMAL_QUANTILE, float(ratios.max()))
    return float(np.sort(ratios)[place - 1])


def _place(works: Sequence[OpWork], part: Pass, kind: DeviceKind, dtype: str) -> _Points:
    amounts = [_amount(work, part) for work in works]
    moved = np.log2([max(amount.num_bytes, 1.0) for amount in amounts])
    return _Points(
        places=np.column_stack([np.array([work.sizes for work in works]), moved]),
        bounds=bound_amounts(amounts, kind, dtype),
        operators=np.array([work.operator for work in works]),
        variants=np.array([work.variant for work in works]),
    )


def _covariance(these: _Points, those: _Points) -> Floats:
    """Return the covariance, shape (these, those)."""
    squares = (these.places**2).sum(axis=1)[:, None] + (those.places**2).sum(axis=1)[None, :]
    apart = np.sqrt((squares - 2.0 * these.places @ those.places.T).clip(min=0.0))
    scaled = math.sqrt(3.0) / _SCALE * apart
    same = 1.0 + (these.operators[:, None] == those.operators) + (these.variants[:, None] == those.variants)
    covariance: Floats = same * (_SHARED + _ALIKE * (1.0 + scaled) * np.exp(-scaled))
    return covariance


def _amount(work: OpWork, part: Pass) -> Amount:
    return {"forward": work.forward, "backward": work.backward, "accumulate": work.accumulate}[part]


def _seconds(row: OpMeasurement, part: Pass) -> float:
    return {"forward": row.forward_s, "backward": row.backward_s, "accumulate": row.accumulate_s}[part]
