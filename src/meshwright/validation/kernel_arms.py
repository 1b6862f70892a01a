"""Baselines of the kernels' comparison: what others would predict from the same training rows, per kernel family.

roofline          max(FLOPs / peak, bytes / bandwidth), the datasheet alone
constant          best constant x roofline, the one with the smallest mean relative error on the training rows
line              a + b·FLOPs by least squares (pipeDejavu fits time on size so)
BSP               λ·(FLOPs / peak + bytes / bandwidth), one λ (Amarís et al., 2015, without shared memory)
linear, SVM, forest   ln t on the logarithms of sizes, FLOPs, bytes, tiles and waves, with features selected: of each
                  cluster of features with Spearman's |ρ| > 0.95 to each other, the one that says most of ln t
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshwright.cost.kernels.demand import demand_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from meshwright.cost.kernels.demand import Demand
    from meshwright.cost.kernels.fit import FitRows
    from meshwright.cost.prediction import Floats


class Regressor(Protocol):
    """A regressor of scikit-learn."""

    def fit(self, features: Floats, target: Floats) -> object:
        """Fit to rows."""

    def predict(self, features: Floats) -> Floats:
        """What the target would be."""


Arm = tuple[str, "Callable[[FitRows, FitRows], Floats]"]

# Features that rank the rows almost equally count as one.
_ALIKE = 0.95
# Rows that a support vector machine is fitted to at most; its time grows with their square.
_MAX_VECTORS = 2000
_CONSTANTS = np.exp(np.linspace(-2.0, 5.0, 701))


def roofline_seconds(part: FitRows) -> Floats:
    """The datasheet's roofline of every row, without a launch."""
    demand = _demand(part)
    bound: Floats = np.maximum(demand.flops, demand.memory)
    return bound


def best_constant(parts: Iterable[FitRows]) -> float:
    """The factor on the roofline with the smallest mean relative error on all rows of the parts."""
    ratios = np.concatenate([roofline_seconds(part) / part.seconds for part in parts])
    return float(_CONSTANTS[np.argmin([np.abs(factor * ratios - 1).mean() for factor in _CONSTANTS])])


def fitted_arms(*, slow: bool) -> tuple[Arm, ...]:
    """Names and functions (training rows, rows to predict) -> seconds; without ``slow``, only closed forms."""
    forms: tuple[Arm, ...] = (
        ("roofline", lambda _, test: roofline_seconds(test)),
        ("constant x roofline", lambda train, test: best_constant([train]) * roofline_seconds(test)),
        ("pipeDejavu's line", _line),
        ("BSP, one lambda", _bulk),
    )
    if not slow:
        return forms
    # An optional extra: only this comparison needs it.
    from sklearn.ensemble import RandomForestRegressor  # noqa: PLC0415
    from sklearn.linear_model import LinearRegression  # noqa: PLC0415
    from sklearn.svm import SVR  # noqa: PLC0415

    return (
        *forms,
        ("linear regression", lambda train, test: _learned(train, test, LinearRegression())),
        ("support vectors", lambda train, test: _learned(train, test, SVR(C=10.0, epsilon=0.02), _MAX_VECTORS)),
        ("random forest", lambda train, test: _learned(train, test, RandomForestRegressor(100, random_state=0))),
    )


def _line(train: FitRows, test: FitRows) -> Floats:
    here, there = _demand(train).flops, _demand(test).flops
    slope, start = np.polyfit(here, train.seconds, 1) if len(here) > 1 else (0.0, train.seconds[0])
    # Where the line is below zero, the smallest observed time is predicted.
    predicted: Floats = np.maximum(start + slope * there, train.seconds.min())
    return predicted


def _bulk(train: FitRows, test: FitRows) -> Floats:
    here, there = (demand.flops + demand.memory for demand in (_demand(train), _demand(test)))
    predicted: Floats = np.median(train.seconds / here) * there
    return predicted


def _learned(train: FitRows, test: FitRows, regressor: Regressor, most: int | None = None) -> Floats:
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    some = np.random.default_rng(0).permutation(len(train.seconds))[:most]
    here, target = _features(train)[some], np.log(train.seconds[some])
    used = select_features(here, target)
    model = make_pipeline(StandardScaler(), regressor)
    model.fit(here[:, used], target)
    predicted: Floats = np.exp(model.predict(_features(test)[:, used]))
    return predicted


def select_features(features: Floats, target: Floats) -> NDArray[np.int64]:
    """Columns of features (rows, features): of each cluster of alike ones, the one that ranks the target best."""
    from sklearn.cluster import AgglomerativeClustering  # noqa: PLC0415

    ranks = np.argsort(np.argsort(np.column_stack([features, target]), axis=0), axis=0).astype(float)
    varied = np.flatnonzero(features.std(axis=0) > 0)
    if len(varied) < 2:
        return varied
    alike = np.abs(np.corrcoef(ranks[:, [*varied, -1]].T))
    labels = AgglomerativeClustering(
        n_clusters=None, metric="precomputed", linkage="complete", distance_threshold=1 - _ALIKE
    ).fit_predict(1 - alike[:-1, :-1])
    says = alike[-1, :-1]
    best = [max(np.flatnonzero(labels == label), key=lambda place: says[place]) for label in np.unique(labels)]
    return varied[sorted(best)]


def _features(part: FitRows) -> Floats:
    demand = _demand(part)
    widest = demand.each("waves").min(axis=0), demand.each("waves").max(axis=0), demand.each("fill")[-1]
    shares = (demand.flops, demand.memory, demand.flops / demand.memory, demand.cached, *widest)
    features: Floats = np.log(
        np.column_stack([*(column + 1.0 for column in part.sizes.values()), *(s + 1e-12 for s in shares)])
    )
    return features


def _demand(part: FitRows) -> Demand:
    kernel = part.kernel
    return demand_of(kernel.op, part.sizes, kernel.dtype, kernel.family, kernel.device)
