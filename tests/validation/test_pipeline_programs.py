"""Pipelines of known stage times as Programs, against following every forward and backward by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.steps import StageSeconds, pipeline_seconds
from meshwright.validation.pipeline_programs import simulated_seconds
from tests.cost.pipelines import follow_1f1b

SECONDS = st.floats(0.5, 2)


def stages_of(forwards, transfer_s=0.0):
    return tuple(
        StageSeconds(forward_s=f, input_gradient_s=1.2 * f, weight_gradient_s=0.8 * f, transfer_s=transfer_s)
        for f in forwards
    )


@settings(max_examples=25)
@given(forwards=st.lists(SECONDS, min_size=2, max_size=5), num_microbatches=st.integers(1, 10))
def test_unequal_stages_take_what_following_them_takes(forwards, num_microbatches):
    stages = stages_of(forwards)
    found = simulated_seconds(stages, num_microbatches, "1f1b", 1, blocking=False)
    assert found == pytest.approx(follow_1f1b(stages, num_microbatches), rel=1e-9)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-1p", 1)])
def test_equal_stages_take_what_the_closed_form_says(schedule, chunks):
    stages = stages_of([1.0] * 4)
    found = simulated_seconds(stages, 16, schedule, chunks, blocking=False)
    assert found == pytest.approx(pipeline_seconds(stages, 16, schedule, chunks), rel=0.02)


@settings(max_examples=10)
@given(transfer_s=st.floats(0.01, 0.2), num_microbatches=st.integers(2, 8))
def test_messages_that_block_take_longer(transfer_s, num_microbatches):
    stages = stages_of([1.0, 1.0, 1.0], transfer_s)
    silent = simulated_seconds(stages_of([1.0, 1.0, 1.0]), num_microbatches, "1f1b", 1, blocking=False)
    beside, blocked = (
        simulated_seconds(stages, num_microbatches, "1f1b", 1, blocking=blocking) for blocking in (False, True)
    )
    assert silent < beside <= blocked * (1 + 1e-9)


def test_what_a_schedule_does_not_take_has_the_closed_form():
    stages = stages_of([1.0, 2.0, 1.0])
    # Seven microbatches are no multiple of three stages; a million are too many.
    for count in (7, 1_000_000):
        found = simulated_seconds(stages, count, "interleaved", 2, blocking=True)
        assert found == pipeline_seconds(stages, count, "interleaved", 2)
