"""Instructions that come, go and move: always the ends of a plain walk through all of them, in order of their keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator.delta.rewire import StreamRows
from meshwright.simulator.delta.streams import DeltaStreams
from meshwright.spec import ProgramError
from tests.marks import examples

pytestmark = pytest.mark.long

GONE = (-1, 0, 0, ())


def walk(rows):
    """By instruction its end; ``rows``: by instruction (stream, key, duration, waits)."""
    end, latest = {}, {}
    for i in sorted(rows, key=lambda i: rows[i][1]):
        stream, _, duration, waits = rows[i]
        latest[stream] = end[i] = max([latest.get(stream, 0), *(end[k] for k in waits)]) + duration
    return end


def columns(rows):
    made = list(rows.values())
    return StreamRows(
        instruction=np.array(list(rows), np.int64),
        stream=np.array([row[0] for row in made], np.int32),
        key=np.array([row[1] for row in made], np.int64),
        duration_ps=np.array([row[2] for row in made], np.int64),
        wait_offsets=np.cumsum([0, *(len(row[3]) for row in made)]).astype(np.int64),
        waits=np.array([k for row in made for k in row[3]], np.int32),
    )


def draw_change(rng, rows, count, num_streams, room):
    """Some instructions go, come or move, with those that wait for them; the rows that differ, and all rows then."""
    chosen = rng.choice(room, count, replace=False).tolist()
    after = {i: row for i, row in rows.items() if i not in chosen}
    for i, (stream, key, duration, waits) in list(after.items()):
        after[i] = stream, key, duration, tuple(k for k in waits if k in after)
    keys = iter(rng.permutation([key for key in range(2 * room) if key not in {row[1] for row in after.values()}]))
    for i in (i for i in chosen if rng.random() < 0.8):
        key = int(next(keys))
        below = [k for k in after if after[k][1] < key]
        waits = rng.choice(below, min(len(below), rng.integers(3)), replace=False) if below else []
        after[i] = int(rng.integers(num_streams)), key, int(rng.integers(5)), tuple(int(k) for k in waits)
        for k in (k for k in list(after) if after[k][1] > key and rng.random() < 1 / len(after)):
            after[k] = *after[k][:3], (*after[k][3], i)
    differ = {i: after.get(i, GONE) for i in {*rows, *after} if rows.get(i) != after.get(i)}
    return differ, after


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**31), num_streams=st.integers(1, 4), size=st.integers(1, 250))
def test_changes_are_those_of_a_plain_walk(seed, num_streams, size):
    rng, rows = np.random.default_rng(seed), {}
    simulation = DeltaStreams(num_streams)
    for step in range(8):
        count = int(rng.integers(1, 6)) if step else size
        differ, after = draw_change(rng, rows, count, num_streams, 2 * size + 6)
        before = simulation.end_ps.copy()
        simulation.change(columns(differ))
        ends = {int(i): int(simulation.end_ps[i]) for i in np.flatnonzero(simulation.is_there)}
        assert ends == walk(after)
        assert simulation.end_ps[~simulation.is_there].max(initial=-1) == -1
        if rng.random() < 0.5:
            simulation.undo()
            assert np.array_equal(simulation.end_ps[: len(before)], before)
        else:
            rows = after
        order = simulation.rows().instruction.tolist()
        assert order == sorted(rows, key=lambda i: rows[i][:2])


def test_what_does_not_fit_changes_nothing():
    simulation = DeltaStreams(2)
    first = {0: (0, 10, 5, ()), 1: (1, 20, 5, (0,))}
    simulation.change(columns(first))
    for wrong in (
        {0: GONE},
        {1: (1, 20, 5, (2,))},
        {1: (1, 5, 5, (0,))},
        {2: (0, 10, 1, ())},
        {0: (0, 30, 5, ())},
    ):
        with pytest.raises(ProgramError, match="Change all that belong together"):
            simulation.change(columns(wrong))
        assert simulation.end_ps[:2].tolist() == [5, 10]
        assert simulation.is_there.sum() == 2
    simulation.change(columns({0: GONE, 1: (1, 20, 5, ())}))
    assert simulation.end_ps[:2].tolist() == [-1, 5]
    with pytest.raises(ValueError, match="read-only"):
        simulation.end_ps[1] = 7


def wrong_rows():
    """What is said of rows, and the rows."""
    by_message = {
        "into stream 2; expected 0 to 1": {2: (2, 30, 5, ())},
        "into stream -2": {2: (-2, 30, 5, ())},
        "Instructions -1 to 2 were given": {-1: (0, 30, 5, ()), 2: (0, 40, 5, ())},
        "was to take -5 ps": {2: (0, 30, -5, ())},
        "waits for instruction 1000000, which": {2: (0, 30, 5, (10**6,))},
        "waits for instruction -3, which": {2: (0, 30, 5, (0, -3))},
        "or that does not come before it": {2: (0, 30, 5, (0,)), 1000: (0, 40, 5, tuple(range(3, 900)))},
    }
    for message, rows in by_message.items():
        yield message, columns(rows)
    rows = columns({2: (0, 30, 5, (0,)), 3: (1, 40, 5, ())})
    yield "Instruction 2 was given twice", rows._replace(instruction=np.array([2, 2]))
    yield "have 1 streams, 2 keys", rows._replace(stream=rows.stream[:1])
    yield "2 streams, 2 keys, 3 durations", rows._replace(duration_ps=np.arange(3))
    yield "2 durations and 2 offsets", rows._replace(wait_offsets=rows.wait_offsets[1:])
    yield "float64 .* expected .* integers", rows._replace(duration_ps=np.array([1.5, 2]))
    for offsets in ([0, 1, 2], [1, 1, 1], [0, 2, 1], [0, -1, 1], [0, 0, 0]):
        yield "Offsets of waits go from", rows._replace(wait_offsets=np.array(offsets))


@pytest.mark.parametrize(("message", "wrong"), list(wrong_rows()))
def test_rows_are_refused_before_any_is_written(message, wrong):
    """The change before can still be taken back; and where room was made for what is refused, too."""
    simulation = DeltaStreams(2)
    first = {0: (0, 10, 5, ()), 1: (1, 20, 5, (0,)), 4: (1, 25, 5, (0, 1))}
    simulation.change(columns(first))
    simulation.change(columns({0: (0, 10, 9, ()), 4: (1, 25, 5, ())}))
    with pytest.raises(ProgramError, match=message):
        simulation.change(wrong)
    assert simulation.end_ps[simulation.is_there].tolist() == [9, 14, 19]
    simulation.undo()
    assert simulation.end_ps[simulation.is_there].tolist() == [5, 10, 15]
    found, given = simulation.rows(), columns(first)
    assert all(np.array_equal(column, wanted) for column, wanted in zip(found, given, strict=True))
    with pytest.raises(ProgramError, match="only the last one can be, once"):
        simulation.undo()


def test_waits_have_room_again_after_a_refused_change():
    """The last of 900 waits for all others, then for none; what is refused packs the waits anew, and waits for one."""
    simulation = DeltaStreams(2)
    first = {i: (0, i, 1, ()) for i in range(899)} | {899: (1, 899, 1, tuple(range(899)))}
    simulation.change(columns(first))
    simulation.change(columns({899: (1, 899, 1, ())}))
    with pytest.raises(ProgramError, match="Change all that belong together"):
        simulation.change(columns({5000: (0, 5000, 1, (4000,))}))
    simulation.undo()
    assert len(simulation._graph.waits) >= 899
    assert simulation.end_ps[899] == 900
    assert simulation.rows().waits.tolist() == list(range(899))
