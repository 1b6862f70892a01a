"""Score op costs on a CPU for models whose ops were not measured.

Data: ops of zoo models on one core, measured by `meshwright measure`, each model in its own table
(``data/cpu_ops.parquet``; machine, versions and date are in its rows). One transformer and one convolutional model are
scored, drawn before the first fit (``splits/cpu_ops_*.json``, fold 0). All their batch sizes are left out of the fit,
and so is every row of another model that shares a key with them, at any batch size.

Arms: "ours" (`cost.ops`); the roofline of the shipped description of a CPU, where a view counts as one launch; the
roofline times one constant per pass, the median of the training rows; the nearest measured op of the same kind, times
the ratio of the rooflines; and ours with the op's role in its model, the last part of its module's path without digits
(``wq``, ``downsample``), as one more feature. The role made the figures of "others in turn" worse (median 24.4 instead
of 22.2 on twelve models), so no cost uses it.

The form of ours was chosen on all models except the scored two, leaving out one of them after the other. Those figures
are shown as "others in turn": they prove nothing, because the form was chosen on them. Adding to gradients is measured
as a difference of two passes; two models that share a key give figures that differ by 40 % (median), so these figures
are only reported, without a target.

Totals sum all ops of a model in one pass, each as often as it was timed; `cost.costs` adds their intervals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost import add_intervals
from meshwright.cost.costs import Floats, Predictions, join_predictions
from meshwright.cost.ops import PASSES, OpRegressor, Pass, fit_op_regressor
from meshwright.cost.ops.regressor import bound_amounts
from meshwright.cost.work import OpWork, read_work, relatives
from meshwright.records import Records, to_measurements
from meshwright.spec import OpMeasurement, load_cluster, load_shipped_graph, op_key
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, read_folds, refuse_seen, score_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DATASET = "cpu_ops"
# The models among which the scored two were drawn, by the name of the draw.
DRAWN = {
    "cpu_ops_transformers": ("bert-base", "gpt2-small", "t5-small"),
    "cpu_ops_convolutional": ("resnet18", "resnet50", "vgg16"),
}
TARGET_MEDIAN = 20.0
# The device and the dtype of all rows.
_DEVICE, _DTYPE = "cpu", "float32"
# Those at which the models were measured.
_BATCH_SIZES = (1, 2, 4)
# Times that reading the clock alone could make (`cost.ops.regressor`).
_RESOLUTION_S = 2e-7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpPredictions:
    """Measured and predicted seconds of ops in one pass; arrays of shape (ops,).

    ``counts``: how often each op was timed. ``arms``: the seconds of the baselines, by name. ``num_timeless``: further
    ops, which are not scored because their measured time is zero; nearly all of them compute nothing in the pass.
    """

    keys: tuple[str, ...]
    measured_s: Floats
    counts: Floats
    ours: Predictions
    arms: dict[str, Floats]
    num_timeless: int


def score_cpu_ops(*, quick: bool = False) -> tuple[Score, ...]:
    """Return the errors on the two scored models, per pass and arm.

    Unless ``quick``, also return the errors on every other model, each left out of the fit in turn.
    """
    models, scored = rows_by_model(), scored_models()
    name = " + ".join(scored)
    found = answer_left_out(models, scored, scored)
    scores = _score(f"{name}: forward, backward", [found["forward"], found["backward"]], TARGET_MEDIAN)
    for part in PASSES:
        scores += _score(f"{name}: {part}", [found[part]])
    if quick:
        return tuple(scores)
    in_turn = [
        answer
        for model in sorted(models.keys() - set(scored))
        for answer in _two_passes(answer_left_out(models, (model, *scored), (model,)))
    ]
    apart = [answer for model in scored for answer in _two_passes(answer_left_out(models, scored, (model,)))]
    scores += _score("others in turn: forward, backward", in_turn)
    scores += [_score_totals(f"{name}: totals", apart), _score_totals("others in turn: totals", in_turn)]
    return tuple(scores)


def scored_models() -> tuple[str, ...]:
    """Return the two models that are scored, from the committed files ``splits/cpu_ops_*.json``."""
    return tuple(models[read_folds(name, models).tolist().index(0)] for name, models in DRAWN.items())


def rows_by_model() -> dict[str, Records]:
    """Return the shipped rows, by the model in which they were measured."""
    records = load_records(DATASET)
    model_of = np.array([source.partition(":")[0] for source in records.source], object)
    return {model: records.select(model_of == model) for model in sorted(set(model_of))}


def answer_left_out(
    models: dict[str, Records], left_out: Sequence[str], asked: Sequence[str]
) -> dict[Pass, OpPredictions]:
    """Return, by pass, the predictions of every arm for the ops of the models ``asked``.

    The arms are fitted on all models that are not ``left_out``, without ops that share a key with those models at any
    batch size. Raises MeasurementError if a row of ``asked`` was fitted on.
    """
    hidden = {relatives(row.key) for model in left_out for row in _ops(models[model])}
    training: list[OpMeasurement] = []
    fitted = [np.zeros(0, np.uint64)]
    for model in sorted(models.keys() - set(left_out)):
        rows = models[model]
        keys = (f"{op}({shapes})" for op, shapes in zip(rows.op, rows.shapes, strict=True))
        rows = rows.select(np.array([relatives(key) not in hidden for key in keys], bool))
        training += _ops(rows) if len(rows) else ()
        fitted.append(rows.row_hashes())
    for model in asked:
        refuse_seen(DATASET, np.concatenate(fitted), models[model].row_hashes())
    kind = load_cluster(_DEVICE).device_kinds[0]
    regressor = fit_op_regressor(training, kind, _DTYPE)
    with_roles = fit_op_regressor(training, kind, _DTYPE, partial(_describe_with_role, _roles(tuple(models))))
    rows_asked = [row for model in asked for row in _ops(models[model]) if regressor.knows(row.key)]
    return {part: _answer(part, rows_asked, training, regressor, with_roles) for part in PASSES}


@cache
def _roles(models: tuple[str, ...]) -> Mapping[str, str]:
    """The last part of a module's path, without digits, by the keys of its ops, in the graphs of these models."""
    graphs = [load_shipped_graph(model) for model in models]
    return {
        op_key(graph, op, size): re.sub(r"\d+", "", op.module).rstrip(".").rpartition(".")[2]
        for graph in graphs
        for size in (_BATCH_SIZES if graph.batch_size is None else (graph.batch_size,))
        for op in graph.ops
    }


def _describe_with_role(roles: Mapping[str, str], key: str) -> OpWork | None:
    work = read_work(key)
    return replace(work, variant=f"{work.variant}/{roles.get(key, '')}") if work is not None else None


def _ops(records: Records) -> tuple[OpMeasurement, ...]:
    return to_measurements(records, _DEVICE).ops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Timed:
    """Ops with a time of one pass: their seconds, rooflines and places among the sizes, (ops,) and (ops, 5)."""

    rows: list[OpMeasurement]
    kinds: list[str]
    seconds: Floats
    roofline_s: Floats
    places: Floats


def _timed(part: Pass, rows: Sequence[OpMeasurement], regressor: OpRegressor) -> _Timed:
    kept = [(row, work) for row in rows if (work := read_work(row.key)) and getattr(row, f"{part}_s") > _RESOLUTION_S]
    kept = [(row, work) for row, work in kept if getattr(work, part).num_calls]
    amounts = [getattr(work, part) for _, work in kept]
    bounds = bound_amounts(amounts, regressor.kind, _DTYPE)
    return _Timed(
        rows=[row for row, _ in kept],
        kinds=[row.key.partition("(")[0] for row, _ in kept],
        seconds=np.array([getattr(row, f"{part}_s") for row, _ in kept]),
        roofline_s=np.maximum(bounds[:, 0], bounds[:, 1]) + bounds[:, 2],
        places=np.array([(*work.sizes, np.log2(1.0 + getattr(work, part).num_bytes)) for _, work in kept]),
    )


def _answer(
    part: Pass,
    rows: Sequence[OpMeasurement],
    training: Sequence[OpMeasurement],
    regressor: OpRegressor,
    with_roles: OpRegressor,
) -> OpPredictions:
    asked, known = _timed(part, rows, regressor), _timed(part, training, regressor)
    efficiency = np.log(known.seconds / known.roofline_s)
    constant, keys = float(np.median(efficiency)), [row.key for row in asked.rows]
    return OpPredictions(
        num_timeless=len(rows) - len(asked.rows),
        keys=tuple(keys),
        measured_s=asked.seconds,
        counts=np.array([row.num_samples for row in asked.rows], np.float64),
        ours=regressor.predict(keys, part),
        arms={
            "roofline": asked.roofline_s,
            "constant x roofline": asked.roofline_s * np.exp(constant),
            "nearest of its kind": asked.roofline_s * np.exp(_nearest(asked, known, efficiency, constant)),
            "ours with roles": with_roles.predict(keys, part).seconds,
        },
    )


def _nearest(asked: _Timed, known: _Timed, efficiency: Floats, constant: float) -> Floats:
    """The efficiency of the nearest measured op of each op's kind; the constant where the kind was never measured."""
    kinds = np.array(known.kinds, object)
    found = np.full(len(asked.rows), constant)
    for place, kind in enumerate(asked.kinds):
        same = np.flatnonzero(kinds == kind)
        if len(same):
            apart = ((known.places[same] - asked.places[place]) ** 2).sum(axis=1)
            found[place] = efficiency[same[np.argmin(apart)]]
    return found


def _two_passes(answers: dict[Pass, OpPredictions]) -> tuple[OpPredictions, OpPredictions]:
    return answers["forward"], answers["backward"]


def _score(part: str, answers: Sequence[OpPredictions], target: float | None = None) -> list[Score]:
    measured = np.concatenate([answer.measured_s for answer in answers])
    ours = join_predictions([answer.ours for answer in answers])
    timeless = sum(answer.num_timeless for answer in answers)
    note = (
        f"{timeless} ops are not scored: their measured time is zero, or less than the clock can tell"
        if timeless
        else ""
    )
    scores = [score_rows(DATASET, part, "ours", measured, ours, judged="median", target=target, note=note)]
    for arm in answers[0].arms:
        seconds = np.concatenate([answer.arms[arm] for answer in answers])
        scores.append(score_rows(DATASET, part, arm, measured, seconds, judged="median"))
    return scores


def _score_totals(part: str, answers: Sequence[OpPredictions]) -> Score:
    """One row per model and pass."""
    totals = [
        add_intervals(
            answer.ours.seconds * answer.counts,
            answer.ours.low_s * answer.counts,
            answer.ours.high_s * answer.counts,
            np.arange(len(answer.counts)),
        )
        for answer in answers
    ]
    predicted = Predictions(
        seconds=np.array([total.seconds for total in totals]),
        low_s=np.array([total.low_s for total in totals]),
        high_s=np.array([total.high_s for total in totals]),
        basis=answers[0].ours.basis[:1] * len(totals),
    )
    measured = np.array([(answer.measured_s * answer.counts).sum() for answer in answers])
    return score_rows(DATASET, part, "ours", measured, predicted, judged="median")
