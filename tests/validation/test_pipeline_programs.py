"""Steps of known stage times as Programs, against following every forward and backward by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.steps import StageSeconds, StepSeconds, pipeline_seconds
from meshwright.spec import PlanError
from meshwright.validation.pipeline_programs import simulated_seconds
from tests.cost.pipelines import follow_1f1b
from tests.marks import examples

SECONDS = st.floats(0.5, 2)


def stages_of(forwards, transfer_s=0.0):
    return tuple(
        StageSeconds(forward_s=f, input_gradient_s=1.2 * f, weight_gradient_s=0.8 * f, transfer_s=transfer_s)
        for f in forwards
    )


def simulate(stages, num_microbatches, schedule="1f1b", chunks=1, blocking=False, **exchange):
    nothing = {"num_buckets": 0, "overlaps": False, "shards": False, "tied_s": 0.0, "clips": False, "rolls": False}
    step = StepSeconds(stages=tuple(stages), **nothing | exchange)
    return simulated_seconds(step, num_microbatches, schedule, chunks, blocking=blocking)


@settings(max_examples=examples(25))
@given(forwards=st.lists(SECONDS, min_size=1, max_size=5), num_microbatches=st.integers(1, 10))
def test_unequal_stages_take_what_following_them_takes(forwards, num_microbatches):
    stages = stages_of(forwards)
    assert simulate(stages, num_microbatches) == pytest.approx(follow_1f1b(stages, num_microbatches), rel=1e-9)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-1p", 1)])
def test_equal_stages_take_what_the_closed_form_says(schedule, chunks):
    stages = stages_of([1.0] * 4)
    found = simulate(stages, 16, schedule, chunks)
    assert found == pytest.approx(pipeline_seconds(stages, 16, schedule, chunks), rel=0.02)


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


@settings(max_examples=20)
@given(
    num_buckets=st.integers(1, 4),
    sum_s=st.floats(0.01, 3),
    gather_s=st.floats(0.01, 1),
    optimizer_s=st.floats(0.01, 1),
    shards=st.booleans(),
    overlaps=st.booleans(),
)
def test_one_stage_exchanges_its_gradients_beside_its_last_backward_or_after_it(
    num_buckets, sum_s, gather_s, optimizer_s, shards, overlaps
):
    (plain,) = stages_of([1.0])
    stage = replace(plain, sum_s=sum_s, gather_s=gather_s * shards, optimizer_s=optimizer_s)
    found = simulate([stage], 3, num_buckets=num_buckets, overlaps=overlaps, shards=shards)
    # By hand: buckets are ready one after the other, at even distances of the last backward of two seconds.
    summed = 0.0
    for bucket in range(num_buckets):
        ready = 3 * 3.0 - (2.0 - 2.0 * (bucket + 1) / num_buckets if overlaps else 0.0)
        summed = max(summed, ready) + sum_s
    expected = max(summed, 9.0) + optimizer_s + num_buckets * gather_s * shards
    assert found == pytest.approx(expected, rel=1e-9)


@settings(max_examples=20)
@given(
    forwards=st.lists(SECONDS, min_size=2, max_size=4),
    sums=st.lists(st.floats(0.0, 2), min_size=4, max_size=4),
    optimizers=st.lists(st.floats(0.01, 2), min_size=4, max_size=4),
    num_microbatches=st.integers(1, 6),
    clips=st.booleans(),
)
def test_stages_exchange_when_they_are_done_and_wait_for_the_norm_of_all(
    forwards, sums, optimizers, num_microbatches, clips
):
    plain = stages_of(forwards)
    stages = [replace(stage, sum_s=s, optimizer_s=o) for stage, s, o in zip(plain, sums, optimizers, strict=False)]
    found = simulate(stages, num_microbatches, num_buckets=1, clips=clips)
    # The time until a stage is done is that until its own sum, where no other one sums.
    done = [
        simulate(
            [replace(stage, sum_s=100.0 * (other == index)) for other, stage in enumerate(plain)],
            num_microbatches,
            num_buckets=1,
        )
        - 100.0
        for index in range(len(plain))
    ]
    summed = [end + stage.sum_s for end, stage in zip(done, stages, strict=True)]
    agreed = [max(summed)] * len(stages) if clips else summed
    expected = max(end + stage.optimizer_s for end, stage in zip(agreed, stages, strict=True))
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_tied_embedding_is_summed_over_the_first_and_the_last_stage():
    stages = stages_of([1.0, 1.0, 1.0])
    alone = simulate(stages, 6)
    for exchange in ({}, {"num_buckets": 1}, {"num_buckets": 1, "shards": True}):
        assert simulate(stages, 6, tied_s=0.5, **exchange) == pytest.approx(alone + 0.5, rel=1e-9)


@pytest.mark.parametrize("num_microbatches", [8, 16])
def test_stages_that_go_on_by_themselves_have_no_bubble(num_microbatches):
    stages = [StageSeconds(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0, optimizer_s=0.5)] * 4
    waiting = simulate(stages, num_microbatches, "zb-2p", clips=True)
    rolling = simulate(stages, num_microbatches, "zb-2p", rolls=True)
    # Of three seconds each; the last stage begins three forwards after the first one.
    assert rolling == pytest.approx(3.0 * num_microbatches + 0.5, rel=0.01)
    assert waiting == pytest.approx(rolling + 3.0, rel=0.01)
