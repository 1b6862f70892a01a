"""Heaps and queues of a pool against plain Python lists and dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.policies import heaps, pool, queues

SIZE = 12


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.one_of(st.none(), st.integers(-3, 3))), max_size=80))
def test_a_heap_is_a_dictionary_that_knows_its_least(steps):
    array = np.zeros(5 + heaps.cells_of_heap(SIZE), np.int64)
    heaps.lay_heap(array, 5, SIZE)
    known = {}
    for number, key in steps:
        if key is None:
            heaps.take_out(array, 5, number)
            known.pop(number, None)
        else:
            heaps.put(array, 5, number, key)
            known[number] = key
        assert heaps.size_of(array, 5) == len(known)
        assert [heaps.is_in(array, 5, each) for each in range(SIZE)] == [each in known for each in range(SIZE)]
        assert heaps.least_of(array, 5, 99) == min(known.values(), default=99)
        if known:
            assert heaps.first_of(array, 5) == min(known, key=lambda each: (known[each], each))


def make_pool(capacity=8):
    latency = np.array([[0, 10, 12, 14, 16], [0, 5, 9, pool.NEVER, pool.NEVER]])
    return pool.allocate_pool(latency, np.array([100, 50]), 2, capacity=capacity)


def waiting(found, queue):
    """The requests of a queue in order, as (deadline, request)."""
    column = pool.columns(found)
    start, mask = column["start"][queue], column["mask"][queue]
    places = [start + (place & mask) for place in range(column["head"][queue], column["tail"][queue])]
    return [(int(column["deadline"][place]), int(column["request"][place])) for place in places]


OPERATIONS = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, 6)),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("forward"), st.integers(0, 3)),
)


@given(st.lists(OPERATIONS, max_size=60))
def test_a_queue_is_a_list_by_deadline(steps):
    found, known, dropped = make_pool(), [], []
    for request, (what, number) in enumerate(steps):
        if what == "enter":
            entered = queues.enter(found, 0, 1, request, number)
            assert entered == (len(known) < 8)
            if entered:
                place = sum(deadline <= number for deadline, _ in known)
                known.insert(place, (number, request))
            else:
                dropped.append(request)
        elif what == "drop":
            count = min(number, len(known))
            queues.drop(found, 0, 1, count, pool.LATE)
            dropped += [request for _, request in known[:count]]
            del known[:count]
        elif what == "cancel":
            there = [item for item in known if item[1] == number]
            deadline = there[0][0] if there else 3
            assert queues.cancel(found, 0, 1, number, deadline) == bool(there)
            known = [item for item in known if item[1] != number]
            dropped += [number] * len(there)
        elif len(known) > 3:
            queues.bring_forward(found, 1, number, 1)
            first = known[number]
            assert waiting(found, 1)[0] == first
            queues.drop(found, 0, 1, 1, pool.LATE)
            dropped.append(first[1])
            known.remove(first)
        assert waiting(found, 1) == known
        assert found[pool.NUM_QUEUED] == len(known)
        assert found[pool.WORK] == 5 * len(known)
        assert found[pool.NUM_DROPPED] == len(dropped)
    assert pool.columns(found)["chosen"][: len(dropped)].tolist() == dropped


def test_devices_are_learned_to_be_slow():
    """Batches that take half as long again: the device is planned with that after a few, and used last."""
    found = make_pool()
    now = 0
    for device in (0, 1):
        queues.come_up(found, device, now)
        queues.rest(found, device)
    for request in range(40):
        queues.enter(found, now, 0, request, 10**9)
        device = queues.idle_device(found)
        queues.run(found, now, 0, 1, device)
        now += 15 if device == 0 else 10
        queues.observe(found, now, device)
        queues.rest(found, device)
        queues.clear(found)
    assert 1250 <= pool.columns(found)["slowness"][0] <= 1500
    assert pool.columns(found)["slowness"][1] == pool.NOMINAL
    assert queues.idle_device(found) == 1
