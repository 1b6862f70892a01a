"""Comparisons against numbers worked out by hand, and of simulated plans with themselves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from meshwright.report import Comparison, compare_timelines, comparison_rows
from meshwright.simulator import simulate_plan
from meshwright.spec import DocumentError, decode_document, encode_document
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.report.timelines import B, F, S, as_measured, make_timeline
from tests.simulator.plans import fast_cluster
from tests.strategies import timelines

SECOND = 10**12


def step_of(step, scale, begin=0):
    """Forward and backward of two microbatches on one rank, each as long as its number times ``scale``."""
    spans, now = [], begin
    for opcode, microbatch, length in ((F, 0, 1), (F, 1, 2), (B, 0, 3), (B, 1, 4)):
        spans.append((0, "compute", opcode, 0, microbatch, -1, now, now + length * scale, step))
        now += length * scale
    return spans


def test_numbers_are_those_worked_out_by_hand():
    predicted = make_timeline(step_of(0, SECOND), peaks=(100,))
    spans, now = [], 0
    for step, scale in enumerate((2, 1, 4)):
        spans += step_of(step, scale * SECOND, now)
        now += 10 * scale * SECOND
    comparison = compare_timelines(predicted, make_timeline(spans, origin="measured", peaks=(80,)))
    # Steps of 20, 10 and 40 s: median 20, percentiles 12 and 36 by linear interpolation.
    assert comparison.step.predicted_s == 10.0
    assert comparison.step.measured_s == 20.0
    assert comparison.step.measured_spread == pytest.approx((36 - 12) / 20)
    assert comparison.step.num_steps == 3
    assert comparison.step.relative_error == -0.5
    (rank,) = comparison.ranks
    assert (rank.predicted_busy_s, rank.measured_busy_s) == (10.0, pytest.approx(70 / 3))
    assert (rank.predicted_peak_bytes, rank.measured_peak_bytes) == (100, 80)
    forward, backward = comparison.instructions
    # Measured forwards: 2, 4, 1, 2, 4, 8 s; backwards: 6, 8, 3, 4, 12, 16 s.
    assert (forward.opcode, forward.num_measured, forward.predicted_s, forward.measured_s) == ("forward", 6, 1.5, 3.0)
    assert forward.relative_error == -0.5
    assert (backward.predicted_s, backward.measured_s) == (3.5, 7.0)
    assert comparison.same_order


def test_the_first_difference_is_named():
    predicted = make_timeline(step_of(0, 5))
    measured = as_measured(make_timeline(step_of(0, 5) + step_of(1, 5, 50)))
    assert compare_timelines(predicted, measured).same_order
    microbatch = measured.microbatch.copy()
    microbatch[[6, 7]] = microbatch[[7, 6]]
    comparison = compare_timelines(predicted, replace(measured, microbatch=microbatch))
    (stream,) = comparison.streams
    assert not comparison.same_order
    assert not stream.same
    assert stream.difference == "rank 0 compute, step 1, instruction 2: predicted B0.0, measured B0.1"
    assert comparison_rows(comparison)["differences"] == [stream.difference]


def test_what_is_missing_or_new_is_a_difference():
    predicted = make_timeline(step_of(0, 5))
    short = compare_timelines(predicted, as_measured(make_timeline(step_of(0, 5)[:3])))
    assert short.streams[0].difference.endswith("instruction 3: predicted B0.1, measured nothing more")
    extra = as_measured(make_timeline([*step_of(0, 5), (0, "send", S, 0, 0, 1, 0, 5)]))
    comparison = compare_timelines(predicted, extra)
    assert [(stream.stream, stream.same) for stream in comparison.streams] == [("compute", True), ("send", False)]
    assert comparison.streams[1].difference.endswith("instruction 0: predicted nothing more, measured send 0→1.0")
    (new,) = (row for row in comparison.instructions if row.opcode == "send_activation")
    assert new.predicted_s is None
    assert new.relative_error is None


@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1, 1], [3, 3, 3]])
def test_a_simulated_plan_compared_with_itself(replicas):
    graph = chain_graph(6, skips=((0, 4),))
    plan = make_plan(graph, even_bounds(6, 3), replicas, 6)
    simulation = simulate_plan(plan, graph, fast_cluster("2x8xA100"), num_steps=3)
    one = simulate_plan(plan, graph, fast_cluster("2x8xA100")).timeline
    measured = as_measured(simulation.timeline, 2.0)
    comparison = compare_timelines(one, measured)
    assert comparison.same_order
    assert {stream.rank for stream in comparison.streams} == set(range(sum(replicas)))
    computing = [row for row in comparison.instructions if row.opcode in ("forward", "backward")]
    assert len(computing) == 6
    assert [row.relative_error for row in computing] == pytest.approx([-0.5] * 6, abs=1e-4)
    assert compare_timelines(simulation.timeline, measured).step.relative_error == pytest.approx(-0.5, abs=1e-4)


@given(timelines())
def test_any_timeline_agrees_with_itself(timeline):
    predicted = replace(timeline, origin="predicted")
    measured = replace(timeline, origin="measured")
    if not timeline.num_spans:
        with pytest.raises(DocumentError, match="has no spans"):
            compare_timelines(predicted, measured)
        return
    comparison = compare_timelines(predicted, measured)
    assert comparison.same_order
    assert all(row.relative_error in (0.0, None) for row in (comparison.step, *comparison.ranks))
    durations = (timeline.end_ps - timeline.start_ps) / 1e12
    for row in comparison.instructions:
        mine = [
            durations[i]
            for i in range(timeline.num_spans)
            if (row.opcode, row.stage) == (_opcode_name(timeline, i), timeline.stage[i])
        ]
        assert row.measured_s == pytest.approx(float(np.median(mine)))
        assert row.num_measured == len(mine)
    assert decode_document(Comparison, encode_document(comparison), "comparison") == comparison


def _opcode_name(timeline, i):
    names = (
        "forward",
        "backward",
        "send_activation",
        "receive_activation",
        "send_gradient",
        "receive_gradient",
        "all_reduce",
        "optimizer_step",
        "backward_input",
        "backward_weight",
        "stash",
        "drop",
        "merge",
        "reduce_scatter",
        "all_gather",
        "push",
        "sum",
        "pull",
        "load",
        "copy_down",
        "host_step",
        "copy_up",
        "read_states",
        "write_states",
        "saved_down",
        "saved_up",
    )
    return names[timeline.opcode[i]]


def test_timelines_that_cannot_be_compared_are_refused():
    predicted = make_timeline(step_of(0, 5))
    with pytest.raises(DocumentError, match="expected a predicted one first"):
        compare_timelines(as_measured(predicted), predicted)
    with pytest.raises(DocumentError, match="1 ranks, the measured one 2"):
        compare_timelines(predicted, as_measured(make_timeline(step_of(0, 5), num_ranks=2)))


def test_a_document_that_contradicts_itself_is_refused():
    predicted = make_timeline(step_of(0, 5))
    data = encode_document(compare_timelines(predicted, as_measured(predicted)))
    assert data["schema"] == "meshwright/comparison/1"
    with pytest.raises(DocumentError, match="compare again"):
        decode_document(Comparison, data | {"same_order": False}, "comparison")
