"""Score predictions between measured sizes on public measurements: collectives and matrix products on V100, in folds.

There are five folds of keys (``splits/v100_collectives.json``, ``splits/v100_matmul.json``). A key is a layout with a
number of bytes; its rows of every op, dtype and mesh are in one fold, so that no repetition gives an answer away. No-op
and plateau points are neither fitted nor scored. A size is *inner* if the fitted rows of its series have a smaller and
a larger size; other sizes, "end sizes", are reported separately.

Baselines on the same folds: straight lines between the measured sizes, the last one extended beyond them (Alpa's rule,
``mesh_profiling.py``), and pipeDejavu's least-squares line per series (``pickle_find_pattern.py``). Another figure
shows what a second measurement would have predicted: the mean of the other repetitions of a layout at a size (in other
dtypes, on other meshes). No arm uses it.

Collectives are predicted by the `CollectiveModel` that users get, fitted on the training rows of the fold, from group,
bytes, dtype and number of concurrent groups; products by the model's interpolation alone. No parameter is chosen on
scored rows: the parameters of each fold are those that predict keys left out of its training rows best
(`meshwright.cost.collectives.kriging`). The same model without dtype and number of groups is another arm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives import fit_collectives
from meshwright.cost.collectives.fitting import collective_rows
from meshwright.cost.collectives.kriging import Points, interpolate, number_labels
from meshwright.cost.costs import Floats, Predictions, fit_interval, join_predictions
from meshwright.validation.collective_rows import predict_rows
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, read_folds, refuse_seen, score_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.cost import Basis
    from meshwright.records import Records

    Indices = NDArray[np.int64]


DATASET = "v100"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Ours is to be at least 10 % below straight lines between the same points (the project's target).
_SHARE_OF_LINES = 0.9
_BASIS: tuple[Basis, ...] = ("interpolated",)
OURS, UNTOLD = "ours", "ours, from group and bytes alone"
LINES, ONE_LINE = "piecewise linear", "pipeDejavu's line"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeriesTable:
    """Rows of one op with their folds; all columns have shape (rows,).

    ``size``: bytes of a collective, or operations of a matrix product. ``series``: number of the series that the row
    belongs to. ``repeated``: rows with the same number measure the same layout at the same size.
    """

    rows: Records
    size: Floats
    series: Indices
    repeated: Indices
    folds: Indices


def score_series(ops: Sequence[str] = (*OPS, "matmul"), folds: Sequence[int] = range(5)) -> tuple[Score, ...]:
    """Score the given ops on the given folds: per op, all arms on inner sizes, then on end sizes."""
    rows = load_records(DATASET)
    scores: list[Score] = []
    for op in ops:
        found = _score_op(op, _products(rows) if op == "matmul" else _collectives(rows, op), folds)
        scores += [replace(score, note=count_flagged(rows.where(op=op))) for score in found]
    return tuple(scores)


def count_flagged(rows: Records) -> str:
    """Return a note on how many rows of an op are neither fitted nor scored: no-op and plateau points."""
    noops, plateaus = rows.has_flag("noop"), rows.has_flag("plateau")
    left_out = int((noops | plateaus).sum())
    return f"of {len(rows)} rows {left_out} are not scored: {int(noops.sum())} no-op, {int(plateaus.sum())} plateau"


def fold_keys(rows: Records) -> list[str]:
    """Return for each measured row of a collective the key by which folds are formed.

    A key has ranks, their stride, nodes, devices per node, groups and bytes; op and dtype are not in it. For a group
    inside one node it has neither nodes nor groups, so that such groups have the same key on every mesh.
    """
    names = ("ranks", "stride", "nodes", "devices_per_node", "groups", "bytes")
    keys = []
    for ranks, stride, nodes, per_node, groups, num_bytes in zip(
        *(rows.size(name).tolist() for name in names), strict=True
    ):
        inside = (ranks - 1) * stride < per_node
        place = "one node" if inside else f"nodes={nodes};devices_per_node={per_node};groups={groups}"
        keys.append(f"ranks={ranks};stride={stride};{place};bytes={num_bytes}")
    return keys


def _collectives(measured: Records, op: str) -> SeriesTable:
    """Rows of a collective."""
    usable = collective_rows(measured)
    keys = fold_keys(usable)
    folds = read_folds("v100_collectives", keys)
    mine = np.flatnonzero(usable.op == op)
    rows, keys = usable.select(mine), [keys[index] for index in mine]
    meshes = zip(
        (key.rsplit(";", 1)[0] for key in keys),
        rows.dtype,
        *(rows.size(name).tolist() for name in ("nodes", "devices_per_node")),
        strict=True,
    )
    return SeriesTable(
        rows=rows,
        size=rows.size("bytes").astype(np.float64),
        series=number_labels(list(meshes)),
        repeated=number_labels(keys),
        folds=folds[mine],
    )


def _products(measured: Records) -> SeriesTable:
    """Square products, over their operations (2·n³)."""
    products = measured.where(op="matmul")
    products = products.select(~products.has_flag("noop"))
    keys = [f"n={size}" for size in products.size("n")]
    kept = np.flatnonzero(~products.has_flag("plateau"))
    rows = products.select(kept)
    return SeriesTable(
        rows=rows,
        size=2.0 * rows.size("n").astype(np.float64) ** 3,
        series=number_labels(list(rows.dtype)),
        repeated=number_labels([keys[index] for index in kept]),
        folds=read_folds("v100_matmul", keys)[kept],
    )


def _say(op: str, table: SeriesTable, fitted: Indices, scored: Indices) -> dict[str, Predictions]:
    """Our predictions of the scored rows from the fitted ones: with all facts of a row, and with fewer."""
    if op != "matmul":
        model, asked = fit_collectives(table.rows.select(fitted)), table.rows.select(scored)
        return {OURS: predict_rows(model, asked), UNTOLD: predict_rows(model, asked, placed_only=True)}
    ones = np.ones(len(table.size))
    points = Points(
        size=table.size, series=table.series, layout=table.series, ranks=ones, nodes=ones, key=table.repeated
    )
    found = interpolate(points.select(fitted), table.rows.seconds[fitted], points.select(scored))
    judged = np.isfinite(found.left_out)
    low_s, high_s = fit_interval(table.rows.seconds[fitted][judged], found.left_out[judged]).around(found.seconds)
    return {OURS: Predictions(seconds=found.seconds, low_s=low_s, high_s=high_s, basis=_BASIS * len(scored))}


def _score_op(op: str, table: SeriesTable, chosen: Sequence[int]) -> list[Score]:
    """Our score and the baselines' on the same rows, inner sizes and end sizes."""
    hashes, seconds = table.rows.row_hashes(), table.rows.seconds
    asked: list[Indices] = []
    said: list[dict[str, Predictions]] = []
    lines: dict[str, list[float]] = {LINES: [], ONE_LINE: []}
    inner: list[bool] = []
    for fold in chosen:
        fitted, scored = np.flatnonzero(table.folds != fold), np.flatnonzero(table.folds == fold)
        refuse_seen(DATASET, hashes[fitted], hashes[scored])
        asked.append(scored)
        said.append(_say(op, table, fitted, scored))
        for row in scored.tolist():
            own, size = fitted[table.series[fitted] == table.series[row]], float(table.size[row])
            inner.append(bool(table.size[own].min() < size < table.size[own].max()))
            lines[LINES].append(_straight(size, table.size[own], seconds[own]))
            lines[ONE_LINE].append(float(np.polyval(np.polyfit(table.size[own], seconds[own], 1), size)))
    rows, is_inner = np.concatenate(asked), np.array(inner)
    ours = {name: join_predictions([part[name] for part in said]) for name in said[0]}
    # A line may fall below zero; it then says that nothing takes a nanosecond.
    baselines = {name: np.maximum(values, 1e-9) for name, values in lines.items()}
    scores = _compare(f"{op}, inner sizes", seconds[rows], ours, baselines, is_inner)
    again = _other_repetitions(table.repeated, seconds)[rows]
    repeated = is_inner & np.isfinite(again)
    if repeated.any():
        part, arm = f"{op}, inner sizes", "the other repetitions"
        scores.append(score_rows(DATASET, part, arm, seconds[rows][repeated], again[repeated]))
    return scores + _compare(f"{op}, end sizes", seconds[rows], ours, baselines, ~is_inner)


def _straight(size: float, sizes: Floats, seconds: Floats) -> float:
    """Seconds on the straight line through the two sizes next to one, or through the last two before it."""
    order = np.argsort(sizes)
    if len(order) == 1:
        return float(seconds[0])
    right = int(np.clip(np.searchsorted(sizes[order], size), 1, len(order) - 1))
    before, after = order[right - 1], order[right]
    slope = (seconds[after] - seconds[before]) / (sizes[after] - sizes[before])
    return float(seconds[before] + slope * (size - sizes[before]))


def _other_repetitions(key: NDArray[np.int64], seconds: Floats) -> Floats:
    """The mean of the other rows of each row's key, shape (rows,); nan for a key with one row."""
    counts = np.bincount(key)[key]
    others = np.bincount(key, weights=seconds)[key] - seconds
    return np.where(counts > 1, others / np.maximum(counts - 1, 1), np.nan)


def _compare(
    part: str, seconds: Floats, ours: dict[str, Predictions], baselines: dict[str, Floats], rows: NDArray[np.bool_]
) -> list[Score]:
    """Scores of some rows; the target for inner sizes is a share of what straight lines reach."""
    if not rows.any():
        return []
    beside = [score_rows(DATASET, part, name, seconds[rows], values[rows]) for name, values in baselines.items()]
    mine = [score_rows(DATASET, part, name, seconds[rows], found.select(rows)) for name, found in ours.items()]
    if "inner" in part:
        mine[0] = replace(mine[0], target=_SHARE_OF_LINES * beside[0].mape)
    return [mine[0], *beside, *mine[1:]]
