"""Stages two and three of the kernel predictor: boosted trees on the residual of the law, and corrections by few rows.

The law is stage one (`cost.kernels.law`). `fit_trees` fits a sum of decision trees over the features of a query
(`features_of`):

    f(x) = Σ over trees v[leaf],   leaf = Σ over levels 2^level · [x[feature] > threshold]

All nodes of a level test the same feature and threshold. So a tree is a table of 2^depth values, and a query is
evaluated without branches. Each tree is fitted to the residual of the previous trees. The test of a level is the one
with the largest gain Σ over leaves g²/(n + r), where g is the sum and n the number of residuals, and r the setting
``holding``. The value of a leaf is ``rate``·g/(n + r).

Sources: Friedman, Stochastic gradient boosting (2002); Prokhorenkova et al., CatBoost (2018), for symmetric trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.compiled import compiled
from meshwright.cost.kernels.demand import SIZES, Demand, seen_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from meshwright.cost.costs import Floats
    from meshwright.cost.kernels.law import Explained


# The number of first features by which the similarity to measured rows is judged (`cost.kernels.boosting`).
NUM_PLACED = 10


# Features: how the law explains a query, its sizes, and how they fit tiles. Shares and ratios come first, so that what
# is learned on one device is useful on another; sizes follow, because libraries choose kernels by them. No feature
# names the device: only the generation of its code is included.
def features_of(
    op: str, sizes: Mapping[str, Floats], demand: Demand, explained: Explained, family: int, capability: float
) -> NDArray[np.float32]:
    """Return the features of n queries of one op, shape (features, n).

    ``sizes``: the columns named in `SIZES`. ``explained``: the law's times for ``demand``. ``family``: the number of
    the kernel family; ``capability``: the CUDA compute capability of the device.
    """
    chosen = demand.ways[explained.way, :, np.arange(len(explained.way))].T
    _, loads, pull, waves, steps, _, doublings, _, fill = chosen
    seconds = explained.seconds
    logs = [np.log1p(sizes[name]) for name in SIZES[op]]
    placed = [
        np.log(explained.compute / seconds),
        np.log(explained.memory / seconds),
        np.log(demand.flops / demand.memory),
        np.log(demand.cached),
        np.log(waves),
        fill,
        np.log(seconds),
        *logs[-3:],
    ]
    shares = [
        -np.log(loads),
        np.log(2) * doublings,
        np.log(pull / seconds),
        np.log(steps),
    ]
    known = [np.full(len(seconds), number) for number in (family, capability)]
    return np.stack([*placed, *shares, *logs[:-3], *_alignment(op, sizes), *known]).astype(np.float32)


def num_features(op: str) -> int:
    """Return the number of features that `features_of` computes for an op."""
    return NUM_PLACED + 6 + len(SIZES[op]) - 3 + (6 if op == "matmul" else 4)


def _alignment(op: str, sizes: Mapping[str, Floats]) -> list[Floats]:
    if op == "matmul":
        m, n, k = (sizes[name] for name in SIZES[op])
        return [np.ceil(m / 64) * 64 / m, np.ceil(m / 16) * 16 / m, m % 8, n / 2 ** np.ceil(np.log2(n)), np.log(m * n),
                np.log(n / k)]  # fmt: skip
    shared = sizes["heads"] / sizes["kv_heads"]
    whole = sizes["queries"] * shared
    seen = seen_keys(sizes["keys"], sizes["window"])
    return [np.log(shared), np.ceil(whole / 64) * 64 / whole, np.log(sizes["batch"] * sizes["kv_heads"]), np.log(seen)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """A correction of predicted times on one device, from the residuals of a few measured rows.

    ``points``: features of the rows divided by their spread, shape (rows, features). ``weights``: shape (rows,).
    """

    points: Floats
    weights: Floats

    def evaluate(self, places: Floats) -> Floats:
        """Return the correction of ln(seconds) of each query, shape (queries,).

        ``places``: features divided by their spread, shape (queries, features), from `Scale.place`.
        """
        return _likeness(places, self.points) @ self.weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scale:
    """Scales of corrections, from the training rows.

    ``spread``: standard deviation of each used feature, shape (features,). ``amplitude``: error of the law alone on
    measured devices (a below). ``noise``: error of the fitted model on held-out rows (s below); both of ln(seconds).
    """

    spread: Floats
    amplitude: float
    noise: float

    def place(self, columns: NDArray[np.float32]) -> Floats:
        """Return the used features divided by their spread, shape (queries, used features).

        ``columns``: all features, shape (features, queries).
        """
        used = columns[: len(self.spread)].T.astype(np.float64)
        return used / self.spread


# Stage three, for a device with few rows: the residuals of both stages on these rows, carried to similar queries:
#
#     r(x) = Σ over rows wᵢ · a²·exp(-|x - xᵢ|²/(2·d)),   w = (K + s²·1)⁻¹ · residuals
#
# a is the error of the law alone on measured devices, s that of the fitted model on held-out rows, x the first features
# of a query divided by their spread over the training rows, d their number: only w is fitted to the rows. Source:
# Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), 2.2.
def fit_correction(places: Floats, residuals: Floats, scale: Scale) -> Correction:
    """Return the correction fitted to measured rows.

    ``places``: features of the rows from `Scale.place`, shape (rows, features). ``residuals``: ln(measured /
    predicted), shape (rows,).
    """
    covariance = scale.amplitude**2 * _likeness(places, places) + scale.noise**2 * np.eye(len(places))
    weights: Floats = scale.amplitude**2 * np.linalg.solve(covariance, residuals).astype(np.float64)
    return Correction(points=places, weights=weights)


def _likeness(here: Floats, there: Floats) -> Floats:
    distance = (here**2).sum(1)[:, None] + (there**2).sum(1)[None, :] - 2 * here @ there.T
    likeness: Floats = np.exp(-np.maximum(distance, 0.0) / (2 * here.shape[1]))
    return likeness


# Rows that are evaluated at a time, so that their features stay in the CPU's cache.
_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostingSettings:
    """Settings of `fit_trees`.

    ``num_bins``: thresholds tried per feature. ``rate``: learning rate. ``holding``: regularisation r of the module's
    formula. ``row_share``, ``feature_share``: random shares (0..1) of the rows and the features that a tree uses.
    """

    num_trees: int = 500
    depth: int = 7
    num_bins: int = 64
    rate: float = 0.07
    holding: float = 4.0
    row_share: float = 0.7
    feature_share: float = 0.6
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """Fitted decision trees, whose values are summed.

    ``features``, ``thresholds``: the test of each level, shape (trees, depth). ``values``: those of the leaves, shape
    (trees, 2^depth).
    """

    features: NDArray[np.int32]
    thresholds: NDArray[np.float32]
    values: NDArray[np.float32]

    def evaluate(self, columns: NDArray[np.float32]) -> Floats:
        """Return the sum of the trees' values for each query, shape (queries,).

        ``columns``: the features of the queries, shape (features, queries).
        """
        total = np.zeros(columns.shape[1], np.float32)
        _add(np.ascontiguousarray(columns), self.features, self.thresholds, self.values, total)
        return total.astype(np.float64)


def fit_trees(columns: NDArray[np.float32], target: Floats, settings: BoostingSettings) -> Trees:
    """Return trees fitted to a target of shape (rows,), by features of shape (features, rows), for at least one row."""
    rng = np.random.default_rng(settings.seed)
    edges, bins = _bin(columns, settings.num_bins)
    num_features, num_rows = columns.shape
    binned = bins.astype(np.float32)
    rest = target.astype(np.float64).copy()
    shape = (settings.num_trees, settings.depth)
    features, places = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    values = np.zeros((settings.num_trees, 2**settings.depth), np.float32)
    for tree in range(settings.num_trees):
        rows = np.flatnonzero(rng.random(num_rows) < settings.row_share)
        allowed = np.flatnonzero(rng.random(num_features) < settings.feature_share)
        if not (len(rows) and len(allowed)):
            continue
        _grow(
            bins, rest, rows, allowed, settings.num_bins, settings.holding, features[tree], places[tree], values[tree]
        )
        values[tree] *= settings.rate
        step = np.zeros(num_rows, np.float32)
        _add(
            binned, features[tree : tree + 1], places[tree : tree + 1].astype(np.float32), values[tree : tree + 1], step
        )
        rest -= step
    return Trees(features=features, thresholds=edges[features, places], values=values)


def _bin(columns: NDArray[np.float32], num_bins: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the upper edges of the bins, shape (features, bins), and the bin of every entry.

    x > edges[b] means a bin above b.
    """
    edges = np.full((len(columns), num_bins), np.inf, np.float32)
    bins = np.empty(columns.shape, np.uint8)
    for index, column in enumerate(columns):
        distinct = np.unique(column)
        cuts = np.unique(np.quantile(column, np.linspace(0, 1, num_bins + 1)[1:-1], method="inverted_cdf"))
        if len(distinct) <= num_bins:
            cuts = distinct[:-1]
        edges[index, : len(cuts)] = cuts
        bins[index] = np.searchsorted(cuts, column, side="left")
    return edges, bins


@compiled
def _grow(
    bins: NDArray[np.uint8],
    rest: Floats,
    rows: NDArray[np.int64],
    allowed: NDArray[np.int64],
    num_bins: int,
    holding: float,
    features: NDArray[np.int32],
    places: NDArray[np.int32],
    values: NDArray[np.float32],
) -> None:
    """Fit one tree on the sampled rows: write its tests, and the value of each leaf."""
    leaves = np.zeros(len(rows), np.int32)
    for level in range(len(features)):
        best = -np.inf
        for feature in allowed:
            gain, cut = _ask(bins[feature], rest, rows, leaves, 1 << level, num_bins, holding)
            if gain > best:
                best, features[level], places[level] = gain, feature, cut
        for index in range(len(rows)):
            leaves[index] |= np.int32(bins[features[level], rows[index]] > places[level]) << level
    sums, counts = np.zeros(len(values)), np.zeros(len(values))
    for index in range(len(rows)):
        sums[leaves[index]] += rest[rows[index]]
        counts[leaves[index]] += 1
    for leaf in range(len(values)):
        values[leaf] = sums[leaf] / (counts[leaf] + holding)


@compiled
def _ask(
    column: NDArray[np.uint8],
    rest: Floats,
    rows: NDArray[np.int64],
    leaves: NDArray[np.int32],
    num_leaves: int,
    num_bins: int,
    holding: float,
) -> tuple[float, int]:
    """Return (gain, bin) of the best cut of all leaves at one bin of a feature."""
    sums, counts = np.zeros((num_leaves, num_bins)), np.zeros((num_leaves, num_bins))
    for index in range(len(rows)):
        sums[leaves[index], column[rows[index]]] += rest[rows[index]]
        counts[leaves[index], column[rows[index]]] += 1
    gains = np.zeros(num_bins - 1)
    for leaf in range(num_leaves):
        whole, number = sums[leaf].sum(), counts[leaf].sum()
        below, few = 0.0, 0.0
        for cut in range(num_bins - 1):
            below += sums[leaf, cut]
            few += counts[leaf, cut]
            gains[cut] += below**2 / (few + holding) + (whole - below) ** 2 / (number - few + holding)
    best = int(np.argmax(gains))
    return gains[best], best


@compiled
def _add(
    columns: NDArray[np.float32],
    features: NDArray[np.int32],
    thresholds: NDArray[np.float32],
    values: NDArray[np.float32],
    total: NDArray[np.float32],
) -> None:
    """Add the trees' sums for queries (columns of shape (features, queries)) to ``total``, block by block."""
    leaves = np.empty(_BLOCK, np.int32)
    for start in range(0, len(total), _BLOCK):
        size = min(_BLOCK, len(total) - start)
        for tree in range(len(values)):
            leaves[:] = 0
            for level in range(features.shape[1]):
                column = columns[features[tree, level], start : start + size]
                _answer(column, thresholds[tree, level], np.int32(1 << level), leaves)
            for row in range(size):
                total[start + row] += values[tree, np.uint32(leaves[row])]


@compiled
def _answer(column: NDArray[np.float32], threshold: np.float32, bit: np.int32, leaves: NDArray[np.int32]) -> None:
    """Apply one test to a block of queries; a separate function, so that it is compiled to vector instructions."""
    for row in range(len(column)):
        leaves[row] += bit * (column[row] > threshold)
