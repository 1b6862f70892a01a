"""A table made wrong by known factors is corrected, and other steps say whether that helped."""

import re
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.cost.calibration import apply_calibration, fit_calibration
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    MeasurementError,
    Measurements,
    OpMeasurement,
    OptimizerMeasurement,
    load_cluster,
    op_key,
)
from meshwright.training import Calibration, calibrate_here, correct_table
from tests.graphs import chain_graph, even_bounds, make_plan

GRAPH = chain_graph(4)
CLUSTER = load_cluster("2xcpu")
PLAN = make_plan(GRAPH, even_bounds(4, 2), [1, 1], 4)


def true_table():
    keys = dict.fromkeys(op_key(GRAPH, op, PLAN.microbatch_size) for op in GRAPH.ops)
    return Measurements(
        device="cpu",
        software="none",
        date="never",
        conditions="made up",
        overhead_s=1e-5,
        ops=tuple(
            OpMeasurement(key=key, forward_s=1e-3 * i, backward_s=2e-3 * i, accumulate_s=1e-4, num_samples=1)
            for i, key in enumerate(keys, 1)
        ),
        optimizers=(
            OptimizerMeasurement(kind="adamw", dtype="float32", num_elements=16, num_tensors=1, seconds=4e-3),
            OptimizerMeasurement(kind="sgd", dtype="float32", num_elements=16, num_tensors=1, seconds=2e-3),
            OptimizerMeasurement(kind="bucket_copy", dtype="float32", num_elements=16, num_tensors=1, seconds=0.0),
        ),
    )


def wrong_table(forward, backward, optimizer):
    table = true_table()
    return replace(
        table,
        ops=tuple(
            replace(
                op,
                forward_s=op.forward_s * forward,
                backward_s=op.backward_s * backward,
                accumulate_s=op.accumulate_s * backward,
            )
            for op in table.ops
        ),
        optimizers=tuple(replace(row, seconds=row.seconds * optimizer) for row in table.optimizers),
    )


def bare(table):
    return replace(table, overhead_s=0.0)


def timeline_of(table, num_steps):
    cost = CostModel(cluster=CLUSTER, measurements=table)
    return simulate_plan(PLAN, GRAPH, CLUSTER, cost=cost, num_steps=num_steps).timeline


@pytest.mark.parametrize("wrong", [(1.5, 1.5, 1.5), (0.5, 3.0, 2.0), (1.0, 1.0, 1.0)])
def test_a_table_that_is_wrong_by_known_factors_is_corrected(wrong):
    found = correct_table(wrong_table(*wrong), PLAN, GRAPH, CLUSTER, timeline_of(true_table(), 8), "chain")
    assert [item.factor for item in found.corrections] == pytest.approx([1 / factor for factor in wrong], rel=1e-6)
    for ours, true in zip(found.table.ops, true_table().ops, strict=True):
        assert (ours.forward_s, ours.backward_s, ours.accumulate_s) == pytest.approx(
            (true.forward_s, true.backward_s, true.accumulate_s), rel=1e-6
        )
    assert [row.seconds for row in found.table.optimizers] == pytest.approx([4e-3, 2e-3, 0.0], rel=1e-6)
    assert abs(found.error_after) < 1e-6
    assert (abs(found.error_before) > 0.05) == (wrong != (1.0, 1.0, 1.0))
    assert (found.num_fitted, found.num_judged) == (4, 4)


def test_steps_that_judge_do_not_correct():
    """Later steps that are ten times as slow change the error, not the factors."""
    slow = timeline_of(wrong_table(10.0, 10.0, 10.0), 2)
    fast = timeline_of(true_table(), 2)
    shift = int(fast.end_ps.max())
    names = ("track", "opcode", "stage", "microbatch", "peer", "num_bytes")
    joined = replace(
        fast,
        **{name: np.concatenate([getattr(fast, name), getattr(slow, name)]) for name in names},
        step=np.concatenate([fast.step, slow.step + 2]),
        start_ps=np.concatenate([fast.start_ps, slow.start_ps + shift]),
        end_ps=np.concatenate([fast.end_ps, slow.end_ps + shift]),
    )
    found = correct_table(true_table(), PLAN, GRAPH, CLUSTER, joined, "chain")
    assert [item.factor for item in found.corrections] == pytest.approx([1.0] * 3)
    assert found.error_after < -0.8


def judged(before_s, after_s, scatter):
    return Calibration(
        table=true_table(),
        corrections=(),
        num_fitted=4,
        num_judged=4,
        measured_s=1.0,
        before_s=before_s,
        after_s=after_s,
        scatter=scatter,
    )


@pytest.mark.parametrize(
    ("before_s", "after_s", "scatter", "told"),
    [
        (1.1, 0.8, 0.0, r"from \+10\.0% to -20\.0%: the table did not improve"),
        (1.1, 1.1, 0.0, "did not improve"),
        (1.1, 1.05, 0.1, r"improved by 5\.0%, but the 4 steps scatter by 10\.0%"),
    ],
)
def test_a_table_that_other_steps_do_not_show_to_be_better_is_kept(before_s, after_s, scatter, told):
    assert re.search(rf"{told}.*kept as it was", judged(before_s, after_s, scatter).why_kept)
    assert not judged(1.1, 0.95, 0.04).why_kept


def test_the_scatter_is_that_of_the_steps_that_judge():
    even = timeline_of(true_table(), 8)
    assert correct_table(true_table(), PLAN, GRAPH, CLUSTER, even, "chain").scatter == pytest.approx(0, abs=1e-6)
    late = even.step == 7
    slowed = replace(even, end_ps=np.where(late, even.end_ps + 10**12, even.end_ps))
    seconds = slowed.step_seconds()[4:]
    low, middle, high = np.percentile(seconds, (10, 50, 90))
    scatter = correct_table(true_table(), PLAN, GRAPH, CLUSTER, slowed, "chain").scatter
    assert scatter == pytest.approx((high - low) / middle / 2)
    assert scatter > 0.1


def test_one_slow_step_does_not_decide():
    table = true_table()
    measured = timeline_of(table, 6)
    late = measured.step == 2
    slowed = replace(measured, end_ps=np.where(late, measured.end_ps + 10**12, measured.end_ps))
    corrections = fit_calibration(timeline_of(table, 2), timeline_of(bare(table), 2), slowed)
    assert [item.factor for item in corrections] == pytest.approx([1.0] * 3)


def test_the_corrected_table_says_so_and_keeps_the_rest():
    table = true_table()
    corrections = fit_calibration(
        timeline_of(table, 2), timeline_of(bare(table), 2), timeline_of(wrong_table(2, 2, 2), 2)
    )
    corrected = apply_calibration(table, corrections, "2 steps of chain")
    assert corrected.conditions == (
        "made up; calibration by 2 steps of chain: forward x 2.000, backward x 2.000, optimizer x 2.000"
    )
    assert (corrected.overhead_s, corrected.transfers, corrected.device) == (1e-5, (), "cpu")


def test_a_table_of_another_device_or_too_few_steps_are_refused():
    with pytest.raises(MeasurementError, match="A100"):
        calibrate_here("gpt-tiny", replace(true_table(), device="A100"), 1)
    with pytest.raises(MeasurementError, match="1 steps"):
        calibrate_here("gpt-tiny", true_table(), 1, num_steps=1)
    with pytest.raises(MeasurementError, match="1 steps were recorded"):
        correct_table(true_table(), PLAN, GRAPH, CLUSTER, timeline_of(true_table(), 1), "chain")


def test_timelines_of_unlike_runs_are_refused():
    other = simulate_plan(make_plan(GRAPH, even_bounds(4, 1), [1], 4), GRAPH, CLUSTER, num_steps=2).timeline
    with pytest.raises(MeasurementError, match="1 ranks"):
        fit_calibration(other, other, timeline_of(true_table(), 2))
