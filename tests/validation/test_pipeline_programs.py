"""Pipelines of known stage times as Programs, against following every forward and backward by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.steps import StageSeconds, pipeline_seconds
from meshwright.validation.pipeline_programs import simulated_seconds

SECONDS = st.floats(0.5, 2)


def stages_of(forwards, transfer_s=0.0):
    return tuple(
        StageSeconds(forward_s=f, input_gradient_s=1.2 * f, weight_gradient_s=0.8 * f, transfer_s=transfer_s)
        for f in forwards
    )


def follow_1f1b(stages, num_microbatches):
    """Seconds of 1F1B; messages take no time."""
    last = len(stages) - 1
    orders = []
    for rank in range(len(stages)):
        warm_up = min(last - rank, num_microbatches)
        order = [("f", i) for i in range(warm_up)]
        for i in range(num_microbatches - warm_up):
            order += [("f", warm_up + i), ("b", i)]
        orders.append(order + [("b", i) for i in range(num_microbatches - warm_up, num_microbatches)])
    done, clock = {}, [0.0] * len(stages)
    while any(orders):
        for rank, order in enumerate(orders):
            if not order:
                continue
            what, i = order[0]
            before = (rank - 1, "f", i) if what == "f" else (rank + 1, "b", i) if rank < last else (rank, "f", i)
            needed = 0.0 if before[0] < 0 else done.get(before)
            if needed is None:
                continue
            stage = stages[rank]
            took = stage.forward_s if what == "f" else stage.input_gradient_s + stage.weight_gradient_s
            clock[rank] = done[rank, what, i] = max(clock[rank], needed) + took
            order.pop(0)
    return max(clock)


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
