"""How far interpolation is from public measurements: collectives and matrix products on V100, sizes left out in folds.

Five folds (``splits/v100_collectives.json``, ``splits/v100_matmul.json``) of keys: a layout at a number of bytes, in
every op, dtype and mesh at once, so that no repetition gives an answer away. No-op and plateau points are neither
fitted nor scored. A size is inner if its series keeps a smaller and a larger one; the others are reported apart.

Beside it on the same folds: straight lines between the measured sizes, the last one extended beyond them (Alpa's rule,
``mesh_profiling.py``), and pipeDejavu's least-squares line per series (``pickle_find_pattern.py``). Also what measuring
again would have said, which no arm is given: the mean of the other repetitions of a layout at a size (in other dtypes,
on other meshes).

Nothing of the kriging is chosen on scored rows: the parameters of each fold are those that serve keys left out of its
training rows best (`meshwright.cost.collectives.kriging`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives.fitting import collective_rows, groups_of
from meshwright.cost.collectives.kriging import Points, interpolate
from meshwright.cost.prediction import Predictions, fit_interval
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.splits import read_folds, refuse_seen

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from meshwright.cost.prediction import Basis, Floats
    from meshwright.records import Records

DATASET = "v100"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Ours is to be at least 10 % below straight lines between the same points (the project's target).
_SHARE_OF_LINES = 0.9
_BASIS: tuple[Basis, ...] = ("interpolated",)


def score_series(ops: Sequence[str] = (*OPS, "matmul"), folds: Sequence[int] = range(5)) -> tuple[Score, ...]:
    """Scores of every op: inner sizes with all arms, then end sizes."""
    rows = load_records(DATASET)
    scores: list[Score] = []
    for op in ops:
        found = _score_op(op, *(_matmul_points(rows) if op == "matmul" else _collective_points(rows, op)), folds)
        scores += [replace(score, note=count_flagged(rows.where(op=op))) for score in found]
    return tuple(scores)


def count_flagged(rows: Records) -> str:
    """What is said of rows of an op that are neither fitted nor scored."""
    noops, plateaus = rows.has_flag("noop"), rows.has_flag("plateau")
    left_out = int((noops | plateaus).sum())
    return f"of {len(rows)} rows {left_out} are not in it: {int(noops.sum())} no-op, {int(plateaus.sum())} plateau"


def fold_keys(rows: Records) -> list[str]:
    """The key of each row of a collective: its layout and bytes, whatever the op, dtype or, on one node, the mesh."""
    names = ("ranks", "stride", "nodes", "devices_per_node", "groups", "bytes")
    keys = []
    for ranks, stride, nodes, per_node, groups, num_bytes in zip(
        *(rows.size(name).tolist() for name in names), strict=True
    ):
        inside = (ranks - 1) * stride < per_node
        place = "one node" if inside else f"nodes={nodes};devices_per_node={per_node};groups={groups}"
        keys.append(f"ranks={ranks};stride={stride};{place};bytes={num_bytes}")
    return keys


def _collective_points(table: Records, op: str) -> tuple[Records, Points, NDArray[np.int64]]:
    """Rows of one op, as points, and their folds."""
    usable = collective_rows(table)
    keys = fold_keys(usable)
    folds = read_folds("v100_collectives", keys)
    mine = np.flatnonzero(usable.op == op)
    rows, keys = usable.select(mine), [keys[index] for index in mine]
    groups = groups_of(rows)
    layouts = [key.rsplit(";", 1)[0] for key in keys]
    meshes = zip(
        layouts, rows.dtype, *(rows.size(name).tolist() for name in ("nodes", "devices_per_node")), strict=True
    )
    points = Points(
        size=rows.size("bytes").astype(np.float64),
        series=_number(list(meshes)),
        layout=_number(layouts),
        ranks=np.array([group.num_ranks for group in groups], np.float64),
        nodes=np.array([group.num_nodes for group in groups], np.float64),
        key=_number(keys),
    )
    return rows, points, folds[mine]


def _matmul_points(table: Records) -> tuple[Records, Points, NDArray[np.int64]]:
    """Square products, as points over their operations (2·n³), and their folds."""
    products = table.where(op="matmul")
    products = products.select(~products.has_flag("noop"))
    keys = [f"n={size}" for size in products.size("n")]
    kept = np.flatnonzero(~products.has_flag("plateau"))
    folds, rows = read_folds("v100_matmul", keys)[kept], products.select(kept)
    dtypes = _number(list(rows.dtype))
    points = Points(
        size=2.0 * rows.size("n").astype(np.float64) ** 3,
        series=dtypes,
        layout=dtypes,
        ranks=np.ones(len(rows)),
        nodes=np.ones(len(rows)),
        key=_number([keys[index] for index in kept]),
    )
    return rows, points, folds


def _score_op(op: str, rows: Records, points: Points, folds: NDArray[np.int64], chosen: Sequence[int]) -> list[Score]:
    hashes = rows.row_hashes()
    arms = {
        name: np.full(len(rows), np.nan) for name in ("ours", "low", "high", "piecewise linear", "pipeDejavu's line")
    }
    inner = np.zeros(len(rows), bool)
    for fold in chosen:
        for across in (False, True):
            class_of = (points.nodes > 1) == across
            fitted, scored = np.flatnonzero(class_of & (folds != fold)), np.flatnonzero(class_of & (folds == fold))
            if not len(scored):
                continue
            refuse_seen(DATASET, hashes[fitted], hashes[scored])
            known, asked = points.select(fitted), points.select(scored)
            found = interpolate(known, rows.seconds[fitted], asked)
            judged = np.isfinite(found.left_out)
            interval = fit_interval(rows.seconds[fitted][judged], found.left_out[judged])
            arms["ours"][scored] = found.seconds
            arms["low"][scored], arms["high"][scored] = interval.around(found.seconds)
            for index in range(len(scored)):
                mine = known.series == asked.series[index]
                sizes, seconds = known.size[mine], rows.seconds[fitted][mine]
                size = asked.size[index]
                inner[scored[index]] = sizes.min() < size < sizes.max()
                arms["piecewise linear"][scored[index]] = _straight(size, sizes, seconds)
                arms["pipeDejavu's line"][scored[index]] = np.polyval(np.polyfit(sizes, seconds, 1), size)
    done = np.isfinite(arms["ours"])
    floor = _other_repetitions(_number(list(zip(points.layout, points.key, strict=True))), rows.seconds)
    again = done & inner & np.isfinite(floor)
    scores = _compare(op, rows.seconds, arms, done & inner, "inner sizes")
    if again.any():
        part = f"{op}, inner sizes"
        scores.append(score_rows(DATASET, part, "the other repetitions", rows.seconds[again], floor[again]))
    return scores + _compare(op, rows.seconds, arms, done & ~inner, "end sizes")


def _straight(size: float, sizes: Floats, seconds: Floats) -> float:
    """Seconds on the straight line through the two sizes beside one, or through the last two before it."""
    order = np.argsort(sizes)
    if len(order) == 1:
        return float(seconds[0])
    right = int(np.clip(np.searchsorted(sizes[order], size), 1, len(order) - 1))
    before, after = order[right - 1], order[right]
    slope = (seconds[after] - seconds[before]) / (sizes[after] - sizes[before])
    return float(seconds[before] + slope * (size - sizes[before]))


def _other_repetitions(key: NDArray[np.int64], seconds: Floats) -> Floats:
    """The mean of the other rows of each row's key, shape (rows,); nan where there are none."""
    counts = np.bincount(key)[key]
    others = np.bincount(key, weights=seconds)[key] - seconds
    return np.where(counts > 1, others / np.maximum(counts - 1, 1), np.nan)


def _compare(op: str, seconds: Floats, arms: dict[str, Floats], rows: NDArray[np.bool_], what: str) -> list[Score]:
    """Our score and the baselines' on the same rows; the target is a share of that of straight lines."""
    if not rows.any():
        return []
    part = f"{op}, {what}"
    # A line may fall below zero; it then says that nothing takes a nanosecond.
    lines = {name: np.maximum(arms[name][rows], 1e-9) for name in ("piecewise linear", "pipeDejavu's line")}
    baselines = [score_rows("v100", part, name, seconds[rows], values) for name, values in lines.items()]
    ours = Predictions(
        seconds=arms["ours"][rows],
        low_s=arms["low"][rows],
        high_s=arms["high"][rows],
        basis=_BASIS * int(rows.sum()),
    )
    target = _SHARE_OF_LINES * baselines[0].mape if what == "inner sizes" else None
    return [score_rows("v100", part, "ours", seconds[rows], ours, target=target), *baselines]


def _number(labels: Sequence[Hashable]) -> NDArray[np.int64]:
    """Equal numbers for equal labels, in order of appearance."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(label, len(known)) for label in labels], np.int64)
