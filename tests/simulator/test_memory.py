"""Bytes in use against a sorted sweep over all moments."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator.simulate import follow_memory
from tests.marks import examples


def random_case(seed: int):
    """Streams of two or three ranks with gaps and positive durations, and classes with bytes in two parts."""
    rng = random.Random(seed)
    num_ranks, num_classes = rng.randint(2, 3), 4
    streams = sorted(rng.randrange(num_ranks) for _ in range(rng.randint(1, 7)))
    offsets, start, end = [0], [], []
    for _ in streams:
        now = 0
        for _ in range(rng.randint(0, 8)):
            start.append(now + rng.randint(0, 2))
            end.append(start[-1] + rng.randint(1, 3))
            now = end[-1]
        offsets.append(len(start))
    draw = lambda rows: np.array([[rng.choice([0, 0, 3, 7]) for _ in range(2)] for _ in range(rows)], np.int64)
    return {
        "stream_ranks": np.array(streams, np.int32),
        "stream_offsets": np.array(offsets, np.int64),
        "cost_class": np.array([rng.randrange(num_classes) for _ in start], np.int32),
        "start_ps": np.array(start, np.int64),
        "end_ps": np.array(end, np.int64),
        "allocate_bytes": draw(num_classes),
        "free_bytes": draw(num_classes),
        "resident_bytes": draw(num_ranks),
    }


def sweep(case):
    """Per rank: (moment, bytes after it) for moments with changes; the peak, and the parts at its first moment."""
    for rank in range(len(case["resident_bytes"])):
        events = []
        for s in np.flatnonzero(case["stream_ranks"] == rank):
            for i in range(case["stream_offsets"][s], case["stream_offsets"][s + 1]):
                c = case["cost_class"][i]
                if case["allocate_bytes"][c].any() or case["free_bytes"][c].any():
                    events.append((case["end_ps"][i], 0, tuple(-case["free_bytes"][c])))
                    events.append((case["start_ps"][i], 1, tuple(case["allocate_bytes"][c])))
        now = case["resident_bytes"][rank].copy()
        series, peak = {0: int(now.sum())}, int(now.sum())
        for moment, _, change in sorted(events, key=lambda event: event[:2]):
            now += change
            series[int(moment)] = int(now.sum())
            peak = max(peak, int(now.sum()))
        yield rank, series, peak


@settings(max_examples=examples(300))
@given(seed=st.integers(0, 2**31))
def test_memory_equals_a_sorted_sweep(seed):
    case = random_case(seed)
    use = follow_memory(**case)
    for rank, series, peak in sweep(case):
        mine = use.rank == rank
        found = dict(zip(use.time_ps[mine].tolist(), use.in_use_bytes[mine].tolist(), strict=True))
        assert found == series
        assert int(use.peak_parts_bytes[rank].sum()) == peak
    assert (np.diff(use.rank) >= 0).all()


def test_parts_are_those_of_the_peak():
    """Part 0 is high first, part 1 later; the sum decides which moment is the peak."""
    use = follow_memory(
        stream_ranks=np.array([0, 0], np.int32),
        stream_offsets=np.array([0, 1, 2], np.int64),
        cost_class=np.array([0, 1], np.int32),
        start_ps=np.array([0, 5], np.int64),
        end_ps=np.array([5, 9], np.int64),
        allocate_bytes=np.array([[10, 0], [2, 9]], np.int64),
        free_bytes=np.array([[10, 0], [2, 9]], np.int64),
        resident_bytes=np.array([[1, 0]], np.int64),
    )
    # At 5 the first gives back before the second takes.
    assert use.peak_parts_bytes.tolist() == [[3, 9]]
    assert use.time_ps.tolist() == [0, 5, 9]
    assert use.in_use_bytes.tolist() == [11, 12, 1]
