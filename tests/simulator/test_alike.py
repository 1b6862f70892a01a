"""Instructions that cost the same, against dictionaries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.simulator.alike import find_distinct, mark_backwards
from meshwright.spec import Opcode

FIRST, LAST = 1, 2


def check_numbers(keys):
    number, first = find_distinct(keys)
    known: dict[tuple[int, ...], int] = {}
    assert number.tolist() == [known.setdefault(tuple(key), len(known)) for key in keys.T.tolist()]
    assert [tuple(keys[:, column].tolist()) for column in first.tolist()] == list(known)


@given(st.integers(1, 4), st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 2), max_size=60))
def test_equal_columns_get_one_number(rows, values):
    check_numbers(np.array(values[: len(values) // rows * rows], np.int64).reshape(rows, -1))


@pytest.mark.parametrize("count", [511, 512, 513, 20_000])
def test_there_may_be_many_distinct_columns(count):
    check_numbers(np.stack([np.arange(2 * count) % count, np.zeros(2 * count, np.int64)]))


_KINDS = (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT, Opcode.OPTIMIZER_STEP)
_streams = st.lists(st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 2)), max_size=12), max_size=4)


@given(_streams)
def test_first_and_last_backwards_before_each_update(streams):
    expected = []
    for stream in streams:
        groups: dict[tuple[int, int], list[int]] = {}
        updates = 0
        for place, (kind, stage) in enumerate(stream):
            updates += kind == Opcode.OPTIMIZER_STEP
            if kind in (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT):
                groups.setdefault((stage, updates), []).append(place)
        firsts, lasts = {own[0] for own in groups.values()}, {own[-1] for own in groups.values()}
        expected += [FIRST * (place in firsts) + LAST * (place in lasts) for place in range(len(stream))]
    rows = [row for stream in streams for row in stream]
    found = mark_backwards(
        np.cumsum([0, *map(len, streams)]),
        np.array([kind for kind, _ in rows], np.int8),
        np.array([stage for _, stage in rows], np.int32),
        3,
    )
    assert found.tolist() == expected
