"""Which requests run first where not all can, against lists; and who is refused in whose place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving import load_policy
from meshwright.serving.policies import queues
from meshwright.serving.policies.ordering import bring_forward, level_of, numbers_of, prefer
from meshwright.serving.policies.pool import (
    CROWDED,
    DROP,
    FULL,
    LEVEL_BIT,
    LEVELED,
    NUM_LEVELS,
    NUM_QUEUED,
    RUN,
    pool_for,
)
from tests.serving.test_queues import CAPACITY, LATENCIES, content, decisions, make_pool

LEVELS = st.integers(-3, 3)


def say(number, level):
    """A request that says how important it is."""
    return number | level << LEVEL_BIT


def num_leveled(pool, queue=0):
    said = sum(level_of(request) != 0 for _, request in content(pool, queue))
    counts = pool[pool[LEVELED] + NUM_LEVELS * queue :][:NUM_LEVELS].tolist()
    assert counts[0] == sum(counts[1:]) == said
    return said


@given(
    requests=st.lists(st.tuples(st.integers(0, 6), LEVELS), min_size=1, max_size=CAPACITY),
    count=st.integers(1, 4),
    turns=st.integers(0, CAPACITY),
)
def test_a_batch_has_the_most_important_ones(requests, count, turns):
    pool = make_pool()
    for turn in range(turns):  # the ring begins anywhere
        queues.enter(pool, 0, 0, turn, 0)
        queues.drop(pool, 0, 0, 1, CROWDED)
    for number, (deadline, level) in enumerate(requests):
        assert queues.enter(pool, 0, 0, say(number, level), deadline)
    before, count = content(pool, 0), min(count, len(requests))
    assert num_leveled(pool) == sum(level != 0 for _, level in requests)
    wanted = sorted(before, key=lambda each: level_of(each[1]))[:count]
    queues.come_up(pool, 0, 0)
    queues.rest(pool, 0)
    queues.clear(pool)
    queues.run(pool, 0, 0, count, 0)
    (row,) = decisions(pool)
    assert row["kind"] == RUN
    # Equally important ones in the order of their deadlines, and of their coming.
    assert sorted(row["requests"]) == sorted(request for _, request in wanted)
    assert content(pool, 0) == [each for each in before if each not in wanted]
    num_leveled(pool)


def test_what_is_due_before_the_first_request_does_not_run_in_its_place():
    """Policies may put those back that a batch would answer too late."""
    pool = make_pool()
    for number, (deadline, level) in enumerate([(1, -3), (2, -3), (5, 0), (6, 1), (7, -1), (8, -2)]):
        queues.enter(pool, 0, 0, say(number, level), deadline)
    bring_forward(pool, 0, 2, 2)
    prefer(pool, 0, 2)
    assert [numbers_of(np.array(request)) for _, request in content(pool, 0)] == [4, 5, 0, 1, 2, 3]


def test_a_full_queue_gives_room_to_what_is_more_important():
    pool = make_pool()
    for number, level in enumerate([0, 2, 0, 3, 3, 0, -1, 0]):
        assert queues.enter(pool, 0, 0, say(number, level), 10 + number)
    assert not queues.enter(pool, 1, 0, say(20, 3), 50)
    assert queues.enter(pool, 2, 0, say(21, 2), 51)
    assert queues.enter(pool, 3, 0, 22, 52)
    assert queues.enter(pool, 3, 0, 23, 53)
    assert queues.enter(pool, 3, 0, say(24, -3), 54)
    refused = [(row["kind"], row["target"], request) for row in decisions(pool) for request in row["requests"]]
    # The last to be due of the least important ones goes first.
    assert refused == [(DROP, FULL, request) for request in (say(20, 3), say(4, 3), say(3, 3), say(21, 2), say(1, 2))]
    assert len(content(pool, 0)) == pool[NUM_QUEUED] == CAPACITY
    assert num_leveled(pool) == 2


def test_who_is_cancelled_need_not_say_how_important_it_was():
    pool = make_pool()
    queues.enter(pool, 0, 0, say(7, -2), 10)
    queues.enter(pool, 0, 0, say(8, 3), 10)
    assert not queues.cancel(pool, 1, 0, 9, 10)
    assert queues.cancel(pool, 1, 0, 8, 10)
    assert queues.cancel(pool, 1, 0, 7, 10)
    assert num_leveled(pool) == pool[NUM_QUEUED] == 0


def test_whoever_waits_is_refused_for_what_is_more_important():
    """Of a policy that refuses early, behind a queue that is as long as can be answered."""
    policy = load_policy("deferred:spare=101,admit=100")
    pool = pool_for(policy, {"latency": LATENCIES, "slo": np.array([100, 100]), "num_devices": 1, "capacity": 64})
    queues.come_up(pool, 0, 0)
    policy.free(pool, 0, 0)
    taken = 0
    while not decisions(pool) or decisions(pool)[-1]["kind"] != DROP:
        policy.arrive(pool, 0, 1, taken, 30)
        taken += 1
        assert taken < 60
    queues.clear(pool)
    policy.arrive(pool, 0, 1, 100, 30)
    policy.arrive(pool, 0, 1, say(101, 2), 30)
    policy.arrive(pool, 0, 1, say(102, -2), 30)
    refused = [
        (row["target"], request) for row in decisions(pool) if row["kind"] == DROP for request in row["requests"]
    ]
    assert [refused[0], refused[1]] == [(CROWDED, 100), (CROWDED, say(101, 2))]
    assert refused[2][0] == CROWDED
    assert level_of(refused[2][1]) == 0
    assert say(102, -2) in [request for _, request in content(pool, 1)]


@pytest.mark.parametrize("level", [-3, 0, 3])
def test_numbers_are_the_same_without_levels(level):
    assert numbers_of(np.array([say(5 << 32 | 9, level)])).tolist() == [5 << 32 | 9]
    assert level_of(say(5 << 32 | 9, level)) == level
