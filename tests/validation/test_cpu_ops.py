"""Ops of models that nobody measured, beside what was measured of them, and where the intervals come from."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from meshwright.cost import op_estimates as table
from meshwright.cost.costs import fit_interval
from meshwright.cost.roofline import bound_op
from meshwright.cost.work import relatives
from meshwright.records import to_measurements
from meshwright.spec import MeasurementError, load_cluster, load_shipped_graph, op_key
from meshwright.validation import cpu_ops


@cache
def quick_scores():
    return cpu_ops.score_cpu_ops(quick=True)


def by_arm(scores, part):
    return {score.arm: score for score in scores if score.part.endswith(part)}


def test_the_two_models_are_those_of_the_draw():
    assert cpu_ops.scored_models() == ("bert-base", "resnet18")


def test_the_target_is_reached_and_every_baseline_is_further_off():
    arms = by_arm(quick_scores(), ": forward, backward")
    ours = arms.pop("ours")
    assert ours.num_rows > 300
    assert ours.target == 20.0
    assert ours.met
    assert len(arms) == 4
    assert all(arm.median > ours.median for arm in arms.values())


@pytest.mark.parametrize("part", [": forward, backward", ": forward", ": backward", ": accumulate"])
def test_the_intervals_hold_what_they_promise(part):
    assert 70.0 <= by_arm(quick_scores(), part)["ours"].coverage <= 90.0


def test_ops_without_a_time_are_counted():
    timeless = {
        part: by_arm(quick_scores(), f": {part}")["ours"].note.partition(" ops")[0]
        for part in ("backward", "accumulate")
    }
    rows = [
        row for name in cpu_ops.scored_models() for row in to_measurements(cpu_ops.rows_by_model()[name], "cpu").ops
    ]
    assert int(timeless["backward"]) == sum(row.backward_s == 0 for row in rows) == 8
    assert int(timeless["accumulate"]) == sum(row.accumulate_s == 0 for row in rows) == 83


def test_a_model_that_was_fitted_on_is_not_scored():
    models = cpu_ops.rows_by_model()
    few = {name: models[name] for name in ("resnet-tiny", "vgg-tiny", "gpt-tiny")}
    with pytest.raises(MeasurementError, match="fitted on"):
        cpu_ops.answer_left_out(few, ("gpt-tiny",), ("vgg-tiny",))


def test_relatives_of_what_is_scored_teach_nothing(monkeypatch):
    taught = []
    fit = cpu_ops.fit_op_regressor
    monkeypatch.setattr(cpu_ops, "fit_op_regressor", lambda rows, *rest: (taught.extend(rows), fit(rows, *rest))[1])
    models = cpu_ops.rows_by_model()
    few = {name: models[name] for name in ("resnet18", "resnet34", "resnet50", "gpt-tiny")}
    answers = cpu_ops.answer_left_out(few, ("resnet18",), ("resnet18",))
    scored = {relatives(key) for key in answers["forward"].keys}
    assert len(taught) > 50
    assert len(scored) > 20
    assert not scored & {relatives(row.key) for row in taught}


def test_the_interval_of_a_measured_op_is_that_of_the_same_op_in_other_models():
    models = cpu_ops.rows_by_model()
    times = defaultdict(list)
    for name, rows in models.items():
        if name not in cpu_ops.scored_models():
            for row in to_measurements(rows, "cpu").ops:
                times[row.key].append((row.forward_s, row.backward_s))
    pairs = [
        (here[part], there[part])
        for found in times.values()
        for i, here in enumerate(found)
        for j, there in enumerate(found)
        for part in (0, 1)
        if i != j and min(here[part], there[part]) > 2e-7
    ]
    measured, other = np.array(pairs).T
    interval = fit_interval(measured, other)
    assert (table.MEASURED.low, table.MEASURED.high) == (
        pytest.approx(interval.low, abs=0.01),
        pytest.approx(interval.high, abs=0.01),
    )


def cases_beside_their_neighbours():
    """Basis → (measured, predicted): every measured op of a shipped graph without its own row, and its roofline."""
    kind = load_cluster("cpu").device_kind(0)
    cases = defaultdict(list)
    for name, rows in cpu_ops.rows_by_model().items():
        if name in (*cpu_ops.scored_models(), "gpt2-small"):  # measured at another length than the shipped graph
            continue
        graph, document = load_shipped_graph(name), to_measurements(rows, "cpu")
        by_key = {row.key: row for row in document.ops}
        for op in {op_key(graph, op, 1): op for op in graph.ops}.values():
            keys = {size: op_key(graph, op, size) for size in (1, 2, 4)}
            for size, key in keys.items():
                if key not in by_key or (size > 1 and key == keys[1]):
                    continue
                others = replace(document, ops=tuple(row for row in document.ops if row.key != key))
                known = table.OpTable(others, "float32").measured_batches(graph, op)
                bound = bound_op(graph, op, size, kind, "float32")
                guesses = {"roofline": bound}
                if known and len(set(keys.values())) == 3:
                    between = min(known) < size < max(known)
                    guesses["interpolated" if between else "transferred"] = (
                        table._between(size, known)
                        if between
                        else table._beside(graph, op, size, kind, "float32", known, bound)
                    )
                for basis, guess in guesses.items():
                    for part in ("forward_s", "backward_s"):
                        measured, predicted = getattr(by_key[key], part), getattr(guess, part)
                        if measured > 2e-7 and predicted > 0:
                            cases[basis].append((measured, predicted))
    return cases


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_intervals_of_other_bases_are_those_of_ops_left_out():
    shipped = {"interpolated": table.INTERPOLATED, "transferred": table.TRANSFERRED, "roofline": table.ROOFLINE}
    for basis, pairs in cases_beside_their_neighbours().items():
        interval = fit_interval(*np.array(pairs).T)
        assert (interval.low, interval.high) == (
            pytest.approx(shipped[basis].low, abs=0.01),
            pytest.approx(shipped[basis].high, rel=0.01),
        ), basis


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_totals_of_models_left_out_lie_in_their_intervals():
    totals = by_arm(cpu_ops.score_cpu_ops(), "others in turn: totals")["ours"]
    assert totals.num_rows == 40
    assert 70.0 <= totals.coverage <= 90.0
