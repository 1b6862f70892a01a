"""Steps of known stage times as Programs, against following every forward and backward by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import simulate_program
from meshwright.spec import PlanError, to_seconds
from meshwright.validation.schedule_sets import StageSeconds, build_pipeline, estimate_pipeline
from tests.marks import examples
from tests.validation.pipelines import follow_1f1b

SECONDS = st.floats(0.5, 2)


def stages_of(forwards, transfer_s=0.0):
    return tuple(
        StageSeconds(forward_s=f, input_gradient_s=1.2 * f, weight_gradient_s=0.8 * f, transfer_s=transfer_s)
        for f in forwards
    )


def simulate(stages, num_microbatches, schedule="1f1b", chunks=1, blocking=False):
    program = build_pipeline(len(stages), num_microbatches, schedule, chunks)
    timeline = simulate_program(program, estimate_pipeline(program, stages, blocking=blocking))
    return to_seconds(int(timeline.end_ps.max()) - int(timeline.start_ps.min()))


@settings(max_examples=examples(25))
@given(forwards=st.lists(SECONDS, min_size=1, max_size=5), num_microbatches=st.integers(1, 10))
def test_unequal_stages_take_what_following_them_takes(forwards, num_microbatches):
    stages = stages_of(forwards)
    assert simulate(stages, num_microbatches) == pytest.approx(follow_1f1b(stages, num_microbatches), rel=1e-9)


@settings(max_examples=10)
@given(transfer_s=st.floats(0.01, 0.2), num_microbatches=st.integers(2, 8))
def test_messages_that_block_take_longer(transfer_s, num_microbatches):
    stages = stages_of([1.0, 1.0, 1.0], transfer_s)
    silent = simulate(stages_of([1.0, 1.0, 1.0]), num_microbatches)
    beside, blocked = (simulate(stages, num_microbatches, blocking=blocking) for blocking in (False, True))
    assert silent < beside <= blocked * (1 + 1e-9)


def test_a_schedule_that_does_not_take_so_many_microbatches_says_so():
    with pytest.raises(PlanError, match="7 microbatches"):
        simulate(stages_of([1.0, 2.0, 1.0]), 7, "interleaved", 2)
