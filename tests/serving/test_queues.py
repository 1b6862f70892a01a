"""What policies do to queues, against lists that are sorted anew each time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.policies import queues
from meshwright.serving.policies.decisions import choices_left, decide, rows_left
from meshwright.serving.policies.ordering import bring_forward
from meshwright.serving.policies.pool import (
    CANCELLED,
    CROWDED,
    DECISION_FIELDS,
    DROP,
    FULL,
    HEAD,
    LATE,
    NEVER,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_DROPPED,
    NUM_IDLE,
    NUM_QUEUED,
    NUM_UP,
    PREEMPT,
    RUN,
    WORK,
    allocate_pool,
    columns,
)

CAPACITY = 8
LATENCIES = np.array([[0, 10, 13, 16, NEVER], [0, 5, 9, 13, 17]])


def make_pool(num_devices=2, **facts):
    return allocate_pool(LATENCIES, np.array([100, 100]), num_devices, capacity=CAPACITY, **facts)


def content(pool, queue):
    """(deadline, request) of a queue in order."""
    by_name = columns(pool)
    first, mask = by_name["start"][queue], by_name["mask"][queue]
    places = first + (np.arange(by_name["head"][queue], by_name["tail"][queue]) & mask)
    return list(zip(by_name["deadline"][places].tolist(), by_name["request"][places].tolist(), strict=True))


def decisions(pool):
    """Rows by name, each with its requests."""
    by_name = columns(pool)
    rows = by_name["decision"].reshape(-1, len(DECISION_FIELDS))[: pool[NUM_DECISIONS]].tolist()
    rows = [dict(zip(DECISION_FIELDS, row, strict=True)) for row in rows]
    return [row | {"requests": by_name["chosen"][row["first"] :][: row["count"]].tolist()} for row in rows]


OPERATIONS = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, 1), st.integers(0, 6)),
    st.tuples(st.just("drop"), st.integers(0, 1), st.integers(0, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 1), st.integers(0, 40)),
    st.tuples(st.just("bring_forward"), st.integers(0, 1), st.integers(0, 60)),
    st.tuples(st.just("value_work"), st.integers(0, 1), st.integers(1, 9)),
)


@given(st.lists(OPERATIONS, max_size=120))
def test_a_queue_is_a_list_by_deadline(operations):
    pool = make_pool()
    lists, units, gone = ([], []), [10, 5], 0
    for number, (name, queue, value) in enumerate(operations):
        mine, told = lists[queue], []
        if name == "enter":
            is_full = len(mine) == CAPACITY
            assert queues.enter(pool, 3, queue, number, value) == (not is_full)
            if is_full:
                told = [(DROP, FULL, [number])]
            else:
                place = next((at for at, (deadline, _) in reversed(list(enumerate(mine))) if deadline <= value), -1)
                mine.insert(place + 1, (value, number))
        elif name == "drop":
            count = min(value, len(mine))
            queues.drop(pool, 3, queue, count, CROWDED)
            told = [(DROP, CROWDED, [request for _, request in mine[:count]])] if count else []
            del mine[:count]
        elif name == "cancel":
            deadline, request = mine[value % len(mine)] if mine and value < 30 else (value % 7, value + 1000)
            # Binary search asks for order, which bring_forward has perhaps given up.
            if mine == sorted(mine, key=lambda each: each[0]):
                found = (deadline, request) in mine
                assert queues.cancel(pool, 3, queue, request, deadline) == found
                if found:
                    mine.remove((deadline, request))
                    told = [(DROP, CANCELLED, [request])]
        elif name == "bring_forward":
            skipped, count = value % (len(mine) + 1), value // (len(mine) + 1) % (len(mine) + 1)
            count = min(count, len(mine) - skipped)
            bring_forward(pool, queue, skipped, count)
            mine[: skipped + count] = mine[skipped : skipped + count] + mine[:skipped]
        else:
            queues.value_work(pool, queue, value)
            units[queue] = value
        gone += sum(len(requests) for _, _, requests in told)
        assert [(row["kind"], row["target"], row["requests"]) for row in decisions(pool)] == told
        queues.clear(pool)
        assert (pool[NUM_DECISIONS], pool[NUM_CHOSEN], pool[NUM_DROPPED]) == (0, 0, gone)
        for each in range(2):
            assert content(pool, each) == lists[each]
        assert pool[NUM_QUEUED] == len(lists[0]) + len(lists[1])
        assert pool[WORK] == units[0] * len(lists[0]) + units[1] * len(lists[1])


def test_a_ring_goes_round_many_times():
    pool = make_pool()
    for turn in range(10):
        for place in range(CAPACITY):
            assert queues.enter(pool, 0, 1, turn * CAPACITY + place, 100 * turn - place)
        assert [request % CAPACITY for _, request in content(pool, 1)] == list(reversed(range(CAPACITY)))
        queues.drop(pool, 0, 1, CAPACITY, LATE)
        queues.clear(pool)
    assert pool[pool[HEAD] + 1] == 10 * CAPACITY


@given(
    deadlines=st.lists(st.integers(0, 60), min_size=1, max_size=CAPACITY),
    begin=st.integers(0, 60),
    target=st.integers(0, 6),
    queue=st.integers(0, 1),
    slack=st.integers(0, 5),
)
def test_batches_and_drops_by_brute_force(deadlines, begin, target, queue, slack):
    pool = make_pool(slack_ns=slack)
    for number, deadline in enumerate(deadlines):
        queues.enter(pool, 0, queue, number, deadline)
    due = [deadline - slack for deadline in sorted(deadlines)]
    length = LATENCIES[queue].tolist()
    length += [NEVER] * 20
    fitting = [batch for batch in range(1, len(due) + 1) if begin + length[batch] <= due[0]]
    assert queues.largest_batch(pool, queue, begin) == max(fitting, default=1)
    skips = [skip for skip in range(len(due)) if length[min(target, len(due) - skip)] <= due[skip] - begin]
    assert queues.skip_for(pool, queue, begin, target) == min(skips, default=len(due) - 1)
    late = next((place for place, each in enumerate(due) if each >= begin + length[1]), len(due))
    queues.drop_late(pool, 0, queue, begin)
    assert [row["requests"] for row in decisions(pool)] == (
        [[r for _, r in sorted((deadline, number) for number, deadline in enumerate(deadlines))][:late]] if late else []
    )


def test_many_refusals_are_one_decision_for_each_reason_and_queue():
    pool = make_pool()
    for number in range(10):
        queues.refuse(pool, 7, 0, number, LATE)
    queues.refuse(pool, 7, 1, 10, LATE)
    queues.refuse(pool, 7, 1, 11, CROWDED)
    queues.refuse(pool, 7, 1, 12, CROWDED)
    assert [(row["target"], row["queue"], row["requests"]) for row in decisions(pool)] == [
        (LATE, 0, list(range(10))),
        (LATE, 1, [10]),
        (CROWDED, 1, [11, 12]),
    ]
    assert pool[NUM_DROPPED] == 13


def test_drops_that_follow_each_other_are_one_decision():
    """Of the same queue and reason, whether they come from a queue or not; what runs between them parts them."""
    pool = make_pool(num_devices=1)
    queues.come_up(pool, 0, 0)
    queues.rest(pool, 0)
    for number in range(6):
        queues.enter(pool, 0, 0, number, 90)
    queues.drop(pool, 0, 0, 2, LATE)
    queues.drop(pool, 0, 0, 1, LATE)
    queues.refuse(pool, 0, 0, 10, LATE)
    queues.run(pool, 0, 0, 1, 0)
    queues.drop(pool, 0, 0, 1, LATE)
    queues.drop(pool, 0, 0, 1, CROWDED)
    assert [(row["kind"], row["target"], row["requests"]) for row in decisions(pool)] == [
        (DROP, LATE, [0, 1, 2, 10]),
        (RUN, 0, [3]),
        (DROP, LATE, [4]),
        (DROP, CROWDED, [5]),
    ]
    assert pool[NUM_DROPPED] == 6


def test_a_pool_that_is_full_of_decisions_takes_no_more():
    """Every cell behind the table and behind the chosen requests stays as it is."""
    pool = make_pool(num_own=3)
    rows = len(columns(pool)["decision"]) // len(DECISION_FIELDS)
    columns(pool)["own"][:] = 77
    for number in range(rows):
        assert rows_left(pool) == rows - number
        decide(pool, PREEMPT, 0, 0, 0, 0, 0)
    chosen = columns(pool)["chosen"].copy()
    with pytest.raises(RuntimeError, match="more decisions at once than its pool has rows for"):
        decide(pool, PREEMPT, 0, 0, 0, 0, 0)
    assert np.array_equal(columns(pool)["chosen"], chosen)
    queues.clear(pool)
    for number in range(len(chosen)):
        assert choices_left(pool) == len(chosen) - number
        queues.refuse(pool, 0, 0, number, LATE)
    with pytest.raises(RuntimeError, match="more requests at once"):
        queues.refuse(pool, 0, 0, 1, LATE)
    queues.enter(pool, 0, 0, 1, 90)
    with pytest.raises(RuntimeError, match="more requests at once"):
        queues.drop(pool, 0, 0, 1, LATE)
    assert columns(pool)["own"].tolist() == [77] * 3


def test_devices_are_counted_as_they_come_and_go():
    pool = make_pool(num_devices=3, delay_ns=2, keep_ends=True)
    for device in (2, 0, 1):
        queues.come_up(pool, device, 5)
        queues.rest(pool, device)
    assert (pool[NUM_UP], pool[NUM_IDLE], queues.idle_device(pool), queues.first_end(pool, 9)) == (3, 3, 0, 9)
    queues.go_down(pool, 0)
    queues.go_down(pool, 0)
    assert (pool[NUM_UP], pool[NUM_IDLE], queues.idle_device(pool)) == (2, 2, 1)
    for number in range(4):
        queues.enter(pool, 10, 0, number, 90)
    queues.run(pool, 10, 0, 2, 1)
    assert (pool[NUM_UP], pool[NUM_IDLE], queues.idle_device(pool)) == (2, 1, 2)
    queues.run(pool, 10, 0, 1, 2)
    queues.run(pool, 10, 0, 1, 1)  # its next batch
    assert queues.idle_device(pool) == -1
    assert queues.first_end(pool, 11) == 22
    assert [(row["kind"], row["target"], row["count"], row["when"]) for row in decisions(pool)] == [
        (RUN, 1, 2, 12),
        (RUN, 2, 1, 12),
        (RUN, 1, 1, 25),
    ]
    queues.preempt(pool, 15, 2)
    assert (pool[NUM_IDLE], queues.idle_device(pool)) == (1, 2)
    queues.go_down(pool, 1)
    queues.go_down(pool, 2)
    assert (pool[NUM_UP], pool[NUM_IDLE], queues.idle_device(pool)) == (0, 0, -1)


def test_columns_cover_the_pool_without_gaps():
    pool = make_pool(num_own=3)
    sizes = {name: len(column) for name, column in columns(pool).items()}
    assert sizes["own"] == 3
    assert sizes["deadline"] == sizes["request"] == 2 * CAPACITY
    first = len(pool) - sum(sizes.values())
    assert 0 < first < 100
    for column in columns(pool).values():
        column[:] = 1
    assert (pool[first:] == 1).all()


@pytest.mark.parametrize("capacity", [1, 2, 3, 1000])
def test_queues_hold_at_least_what_was_asked_for(capacity):
    pool = allocate_pool(LATENCIES, np.array([100, 100]), 1, capacity=capacity)
    assert all(queues.enter(pool, 0, 1, number, 0) for number in range(capacity))
