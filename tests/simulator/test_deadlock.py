"""Programs that can never finish: the circle that is named is real, in order, and there is no shorter one."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import simulate_program
from meshwright.simulator.deadlock import find_circle
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import collectives
from meshwright.simulator.unroll import unroll
from meshwright.spec import DeadlockError
from tests.marks import examples
from tests.simulator.builders import forward, program_of, random_program, reduction, transfer
from tests.simulator.oracle import Oracle


def message_of(rows, num_ranks, groups=()) -> str:
    program, costs = program_of([[], rows, []], num_ranks, [0, 10], [[0]], groups)
    with pytest.raises(DeadlockError) as caught:
        simulate_program(program, costs)
    return str(caught.value)


def test_the_circle_is_told_in_order():
    rows = [forward(0, cost=0), forward(1, cost=0), forward(2, cost=0)]
    back = transfer(1, 0, 7, waits=[rows[1]], cost=1, route=0)
    there = transfer(0, 1, 7, waits=[rows[0]], cost=1, route=0)
    rows[0].waits.append(back[1])
    rows[1].waits.append(there[1])
    assert message_of([*rows, *back, *there], 3) == (
        "The program can never finish: 6 of 7 streams wait for each other in a cycle, or for a stream in it. F0.0 "
        "(rank 0, compute) waits for receive 1→0.7 (rank 0, receive), which waits for send 1→0.7 (rank 1, send), which "
        "waits for F1.0 (rank 1, compute), which waits for receive 0→1.7 (rank 1, receive), which waits for send 0→1.7 "
        "(rank 0, send), which waits for F0.0 (rank 0, compute). Change the order of these instructions in the "
        "schedule."
    )


def test_order_within_a_stream_and_marks_are_told():
    first, second = forward(0, 0, cost=1), forward(0, 1, cost=1)
    other = forward(1, cost=1, waits=[(second, 4)])
    first.waits.append(other)
    assert (
        "F0.0 (rank 0, compute) waits for F1.0 (rank 1, compute), which waits for a mark in F0.1 (rank 0, compute), "
        "which comes after F0.0 (rank 0, compute). "
    ) in message_of([first, second, other], 2)


@pytest.mark.parametrize("part", range(3))
def test_an_instruction_that_waits_for_itself(part):
    """In each section of a program."""
    sections = [[forward(0, microbatch, cost=1)] for microbatch in range(3)]
    sections[part][0].waits.append(sections[part][0])
    program, costs = program_of(sections, 1, [0, 10])
    with pytest.raises(
        DeadlockError, match=rf"F0.{part} \(rank 0, compute\) waits for F0.{part} \(rank 0, compute\)\. "
    ):
        simulate_program(program, costs)


def test_a_member_that_never_arrives_is_named():
    late = forward(1, cost=0)
    rows = [reduction(0, waits=[], cost=1), reduction(1, waits=[late], cost=1), late]
    late.waits.append(rows[0])
    assert (
        "all-reduce 0 #0 (rank 0, exchange) waits for all-reduce 1 #0 (rank 1, exchange), which waits for F1.0 (rank "
        "1, compute), which waits for all-reduce 0 #0 (rank 0, exchange). "
    ) in message_of(rows, 2, [(0, 1)])


def test_what_a_join_has_and_lacks_is_named():
    """Two of three are needed; one ends, the others wait for the join."""
    rows = [forward(rank, cost=1) for rank in range(4)]
    rows[0].waits, rows[0].need = [rows[1], rows[2], (rows[3], 4)], 2
    for rank in (2, 3):
        rows[rank].waits = [rows[0]]
    assert (
        "F0.0 (rank 0, compute) [needs 2 of 3, has 1, lacks F2.0 (rank 2, compute), F3.0 (rank 3, compute)] waits for "
        "F2.0 (rank 2, compute), which waits for F0.0 (rank 0, compute). "
    ) in message_of(rows, 4)


def test_a_long_circle_is_cut():
    rows = [forward(rank, cost=1) for rank in range(30)]
    for rank, row in enumerate(rows):
        row.waits.append(rows[(rank + 1) % 30])
    message = message_of(rows, 30)
    assert "F15.0 (rank 15, compute), which waits for F16.0 (rank 16, compute), and so on through 14 more" in message
    assert "F17.0" not in message


def test_the_shorter_circle_is_named():
    """Ranks 0 to 2 wait in a circle of three; 3 and 4 for each other, and for the others too."""
    rows = [forward(rank, cost=1) for rank in range(5)]
    for rank, awaited in ((0, [1]), (1, [2]), (2, [0]), (3, [0, 4]), (4, [1, 3])):
        rows[rank].waits += [rows[other] for other in awaited]
    message = message_of(rows, 5)
    assert (
        "F3.0 (rank 3, compute) waits for F4.0 (rank 4, compute), which waits for F3.0 (rank 3, compute). " in message
    )


def awaited_by(oracle) -> dict:
    """Key that a stream stands before → keys that it waits for and that never happened."""
    raiser = {mark: key for key, marks in oracle.marks.items() for _, mark in marks}
    found = {}
    for queue, place in zip(oracle.queues, oracle.place, strict=True):
        if place < len(queue):
            key = queue[place]
            waits = oracle.partners[key] if key in oracle.arrived else oracle.waits[key]
            done = oracle.arrived if key in oracle.arrived else oracle.done
            found[key] = {raiser.get(w, w) for w in waits if w not in done}
    return found


def shortest_circle(edges) -> int:
    best = len(edges) + 1
    for root in edges:
        distance, queue = {root: 0}, deque([root])
        while queue:
            node = queue.popleft()
            for target in edges[node]:
                if target == root:
                    best = min(best, distance[node] + 1)
                elif target not in distance:
                    distance[target] = distance[node] + 1
                    queue.append(target)
    return best


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**31), size=st.integers(2, 30), num_steps=st.integers(1, 2), joins=st.booleans())
def test_the_circle_is_real_and_the_shortest(seed, size, num_steps, joins):
    program, costs = random_program(seed, size, may_deadlock=True, joins=joins)
    oracle = Oracle(program, costs, num_steps)
    if None not in oracle.ends():
        return
    unrolled = unroll(program, costs, num_steps)
    outcome = run_network(unrolled.network, unrolled.num_links)
    circle = find_circle(unrolled.network, unrolled.stream, outcome.end_ps, outcome.position)
    keys = [key for queue in oracle.queues for key in queue]
    awaited = awaited_by(oracle)
    stands = {oracle.stream_of[key]: key for key in awaited}
    assert len({waiting for waiting, _ in circle}) == len(circle)
    for (waiting, wanted), (following, _) in zip(circle, [*circle[1:], circle[0]], strict=True):
        assert keys[wanted] in awaited[keys[waiting]]
        assert unrolled.stream[wanted] == unrolled.stream[following]
        assert following <= wanted
    edges = {s: {oracle.stream_of[w] for w in awaited[key]} for s, key in stands.items()}
    assert len(circle) == shortest_circle(edges)


def test_random_programs_deadlock_in_all_ways():
    """Circles of several lengths, through collectives, marks and order within streams, occur."""
    lengths, through_collectives, behind = set(), 0, 0
    for seed in range(150):
        program, costs = random_program(seed, 25, may_deadlock=True)
        unrolled = unroll(program, costs, 1)
        network = unrolled.network
        outcome = run_network(network, unrolled.num_links)
        position = outcome.position
        collective = collectives(network)
        if (position == network.stream_offsets[1:]).all():
            continue
        circle = find_circle(network, unrolled.stream, outcome.end_ps, position)
        lengths.add(len(circle))
        through_collectives += any(
            collective[waiting] >= 0 and collective[waiting] == collective[wanted] for waiting, wanted in circle
        )
        behind += any(position[unrolled.stream[wanted]] != wanted for _, wanted in circle)
    assert {1, 2, 3} <= lengths
    assert min(through_collectives, behind) >= 3
