"""Heaps of numbered items, against a dict and `min`."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.policies.queues import (
    cells_of_heap,
    first_of,
    is_in,
    lay_heap,
    least_of,
    put,
    size_of,
    take_out,
)

SIZE, AT = 12, 5
# Few keys, so that many are equal; and those of int64's ends.
KEYS = st.integers(-3, 3) | st.sampled_from([-(2**63), 2**63 - 1, 2**61])
NUMBERS = st.integers(0, SIZE - 1)
OPERATIONS = st.lists(st.tuples(NUMBERS, KEYS) | st.tuples(NUMBERS, st.none()), max_size=80)


def first_by_key(items):
    return min(items, key=lambda number: (items[number], number))


@given(OPERATIONS)
def test_a_heap_is_a_dict_with_a_minimum(operations):
    array = np.full(AT + cells_of_heap(SIZE) + 4, 77, np.int64)
    lay_heap(array, AT, SIZE)
    items = {}
    for number, key in operations:
        if key is None:
            take_out(array, AT, number)
            items.pop(number, None)
        else:
            put(array, AT, number, key)
            items[number] = key
        assert size_of(array, AT) == len(items)
        assert [is_in(array, AT, each) for each in range(SIZE)] == [each in items for each in range(SIZE)]
        assert least_of(array, AT, 4711) == min(items.values(), default=4711)
        if items:
            assert first_of(array, AT) == first_by_key(items)
    # All come out in order, whatever way they came in; cells around the heap are left alone.
    order = []
    while size_of(array, AT) > 0:
        order.append(first_of(array, AT))
        take_out(array, AT, order[-1])
    assert order == sorted(items, key=lambda number: (items[number], number))
    assert (array[:AT] == 77).all()
    assert (array[AT + cells_of_heap(SIZE) :] == 77).all()
