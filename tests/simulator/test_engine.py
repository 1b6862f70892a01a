"""The engine against a plain event-driven simulation, and by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import simulate_program
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import collectives, fresh_state, routes
from meshwright.simulator.unroll import unroll
from meshwright.spec import DeadlockError, Opcode, ProgramError
from tests.marks import examples
from tests.simulator.builders import ends_by_name, forward, program_of, random_program, reduction, transfer
from tests.simulator.oracle import Oracle
from tests.simulator.oracle_fair import FairOracle

ORACLES = {"queued": Oracle, "fair": FairOracle}
seeds = st.integers(0, 2**31)
contentions = st.sampled_from(sorted(ORACLES))


def assert_equal_to_oracle(seed, size, num_steps, contention, *, may_deadlock=False, joins=False) -> None:
    """Starts and ends of all instructions, and of those that ever end in a program that cannot finish."""
    program, costs = random_program(seed, size, may_deadlock=may_deadlock, joins=joins)
    oracle = ORACLES[contention](program, costs, num_steps)
    expected = oracle.ends()
    unrolled = unroll(program, costs, num_steps)
    outcome = run_network(unrolled.network, unrolled.num_links, contention)
    start_ps, end_ps, position = outcome.start_ps(), outcome.end_ps, outcome.position
    ended = end_ps >= 0
    assert [end if known else None for end, known in zip(end_ps.tolist(), ended, strict=True)] == expected
    assert start_ps[ended].tolist() == [
        start for start, end in zip(oracle.starts(), expected, strict=True) if end is not None
    ]
    stopped = unrolled.network.stream_offsets[:-1] + np.bincount(unrolled.stream[ended], minlength=len(position))
    assert position.tolist() == stopped.tolist()
    if None in expected:
        assert may_deadlock
        with pytest.raises(DeadlockError):
            simulate_program(program, costs, num_steps, contention=contention)
    else:
        assert simulate_program(program, costs, num_steps, contention=contention).end_ps.tolist() == expected


@pytest.mark.parametrize("contention", sorted(ORACLES))
@settings(max_examples=examples(400))
@given(seed=seeds, size=st.integers(1, 25), num_steps=st.integers(1, 3))
def test_engine_equals_the_oracle(contention, seed, size, num_steps):
    assert_equal_to_oracle(seed, size, num_steps, contention)


@pytest.mark.parametrize("contention", sorted(ORACLES))
@settings(max_examples=examples(400))
@given(seed=seeds, size=st.integers(1, 30), num_steps=st.integers(1, 3))
@pytest.mark.matrix
def test_joins_equal_the_oracle(contention, seed, size, num_steps):
    assert_equal_to_oracle(seed, size, num_steps, contention, joins=True)


@settings(max_examples=examples(250))
@given(seed=seeds, size=st.integers(1, 25), num_steps=st.integers(1, 2), contention=contentions, joins=st.booleans())
def test_engine_and_oracle_agree_on_deadlocks(seed, size, num_steps, contention, joins):
    assert_equal_to_oracle(seed, size, num_steps, contention, may_deadlock=True, joins=joins)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000)
@given(
    seed=seeds,
    size=st.integers(1, 60),
    num_steps=st.integers(1, 3),
    contention=contentions,
    may_deadlock=st.booleans(),
    joins=st.booleans(),
)
def test_engine_equals_the_oracle_at_length(seed, size, num_steps, contention, may_deadlock, joins):
    assert_equal_to_oracle(seed, size, num_steps, contention, may_deadlock=may_deadlock, joins=joins)


@settings(max_examples=examples(300))
@given(seed=seeds, size=st.integers(5, 40), contention=contentions, joins=st.booleans())
def test_private_links_change_nothing(seed, size, contention, joins):
    """Whether a link is settled at once or goes through the heap must not show."""
    program, costs = random_program(seed, size, joins=joins)
    unrolled = unroll(program, costs, 2)
    network = unrolled.network
    one, two = (
        run_network(each, unrolled.num_links, contention) for each in (network, network._replace(num_private=0))
    )
    assert np.array_equal(one.start_ps(), two.start_ps())
    assert np.array_equal(one.end_ps, two.end_ps)


def test_random_programs_hold_what_is_to_be_tested():
    """Both kinds of links, collectives, marks and waits occur often enough to mean something."""
    private = shared = joint = marks = busy_links = fairer = split = 0
    for seed in range(60):
        program, costs = random_program(seed, 25)
        network = unroll(program, costs, 1).network
        used = np.setdiff1d(routes(network), [-1])
        shared += int((used >= network.num_private).sum())
        private += int((used < network.num_private).sum())
        joint += len(network.collective_size)
        inside = network.mark_instruction[network.mark_shift_ps < 0]
        marks += len(inside)
        split += int((routes(network)[inside] >= network.num_private).sum())
        ends = run_network(network, costs.num_links).end_ps
        no_route = np.full_like(network.collective_route, -1)
        freed = np.where(collectives(network) >= 0, network.resource, np.int32(-1))
        free = network._replace(resource=freed, collective_route=no_route)
        busy_links += bool((run_network(free, 0).end_ps != ends).any())
        fairer += bool((run_network(network, costs.num_links, "fair").end_ps != ends).any())
    assert min(private, shared, joint, marks, busy_links, fairer, split) >= 20


def test_the_engine_needs_few_bytes_per_instruction():
    """Columns, ends and what changes meanwhile: 16 + 8, and something per stream, link and collective."""
    program, costs = random_program(7, 60)
    unrolled = unroll(program, costs, 200)
    network = unrolled.network
    count, num_waits = len(network.cost_class), len(network.waits)
    columns = [*network, *fresh_state(network, unrolled.num_links)]
    per_collective = 3 * 4 + 20
    least = 20 * count + 4 * num_waits + per_collective * len(network.collective_size)
    least += 12 * len(network.mark_instruction)
    assert sum(np.asarray(column).nbytes for column in columns) - least < 5_000 < count


def test_more_waits_than_can_be_numbered(monkeypatch):
    monkeypatch.setattr("meshwright.simulator.unroll._MOST", 100)
    program, costs = random_program(0, 20)
    with pytest.raises(
        ProgramError, match=r"\d+ instructions with \d+ waits cannot be simulated; expected at most 99 of each"
    ):
        unroll(program, costs, 20)


def test_unknown_contention():
    program, costs = random_program(0, 5)
    with pytest.raises(ProgramError, match=r"'fare' \(did you mean 'fair'\?\)"):
        simulate_program(program, costs, contention="fare")


def test_one_link_by_hand():
    """Rank r computes (5, 3, 3 ps) and sends 10 ps over one link; then all reduce over it, from a mark on.

    The sends of ranks 1 and 2 tie at 3 and go by rank, rank 0's comes at 5; the reduction is last, at 33.
    """
    computed = [forward(0, cost=1), forward(1, cost=2), forward(2, cost=2)]
    rows = list(computed)
    for rank in range(3):
        rows += transfer(rank, (rank + 1) % 3, rank, waits=[computed[rank]], cost=3, route=0)
        rows.append(reduction(rank, waits=[(computed[rank], 1)], cost=4, route=0))
    for rank in range(3):
        # A reduction stands behind the send of its rank.
        rows[3 + 3 * rank + 2].waits.append(rows[3 + 3 * rank])
    program, costs = program_of([[], rows, []], 3, [0, 5, 3, 10, 4], [[0]], [(0, 1, 2)])
    ends = ends_by_name(simulate_program(program, costs))
    assert ends == {
        "0: F0.0": 5,
        "1: F1.0": 3,
        "2: F2.0": 3,
        "1: send 1→2.1": 13,
        "2: send 2→0.2": 23,
        "0: send 0→1.0": 33,
        "0: receive 2→0.2": 23,
        "1: receive 0→1.0": 33,
        "2: receive 1→2.1": 13,
        **{f"{rank}: all-reduce {rank} #0": 37 for rank in range(3)},
    }


@pytest.mark.parametrize(("need", "begin"), [(1, 3), (2, 8), (3, 12), (4, 20)])
@pytest.mark.parametrize("contention", sorted(ORACLES))
def test_a_join_goes_on_with_the_kth_of_its_waits(need, begin, contention):
    """Ends at 20, 12 and 3, and a mark at 8 within the first of them; what comes late does not hold it up."""
    rows = [forward(rank, cost=rank) for rank in range(1, 4)]
    joining = forward(0, cost=4, waits=[*rows, (rows[0], 8)], need=need)
    program, costs = program_of([[], [*rows, joining], []], 4, [0, 20, 12, 3, 5])
    assert ends_by_name(simulate_program(program, costs, contention=contention))["0: F0.0"] == begin + 5


def test_a_join_is_found_late_but_not_late_in_time():
    """Rank 1's send waits for the link until 30, rank 2's chain of sends ends at 12: one of both is needed."""
    slow, other, fast = (transfer(r, 3, r, waits=[], cost=c, route=k) for r, c, k in ((0, 1, 0), (1, 1, 0), (2, 2, 1)))
    again = transfer(3, 2, 9, waits=[fast[0]], cost=2, route=1)
    joining = forward(0, cost=3, waits=[other[0], again[0]], need=1)
    program, costs = program_of([[], [*slow, *other, *fast, *again, joining], []], 4, [0, 15, 6, 1], [[0], [1]])
    assert ends_by_name(simulate_program(program, costs))["0: F0.0"] == 13


@pytest.mark.parametrize("contention", sorted(ORACLES))
@pytest.mark.parametrize("need", [100, 150, 200])
def test_a_join_whose_time_changes_often(contention, need):
    """Rank 1 is slow and known at once; ranks 2 and 3 take turns, each of which makes the join earlier by one.

    The heap of requests holds two entries per stream, so those that hold no more have to be dropped.
    """
    slow = [forward(1, k, cost=1) for k in range(100)]
    turns = [forward(2 + k % 2, k, cost=2) for k in range(100)]
    for before, after in pairwise(turns):
        after.waits.append(before)
    joining = forward(0, cost=2, waits=[*slow, *turns], need=need)
    sent = transfer(2, 3, 0, waits=[turns[-1]], cost=2, route=0)
    other = transfer(3, 2, 1, waits=[turns[-1]], cost=2, route=0)
    rows = [joining, *slow, *turns, *sent, *other]
    program, costs = program_of([[], rows, []], 4, [0, 1000, 1], [[0]])
    expected = ORACLES[contention](program, costs, 1).ends()
    timeline = simulate_program(program, costs, contention=contention)
    assert timeline.end_ps.tolist() == expected
    ends = sorted([*range(1000, 100_001, 1000), *range(1, 101)])
    assert ends_by_name(timeline)["0: F0.0"] == ends[need - 1] + 1


def test_a_transfer_of_two_links_waits_for_both():
    """Requests are served in order of time: what comes later waits even where its own link idles meanwhile."""
    early, late = forward(0, cost=1), forward(2, cost=2)
    first = transfer(0, 1, 0, waits=[], cost=4, route=0)
    both = transfer(2, 3, 0, waits=[early], cost=4, route=1)
    after = transfer(1, 0, 0, waits=[late], cost=4, route=2)
    program, costs = program_of([[], [early, late, *first, *both, *after], []], 4, [0, 1, 2, 0, 10], [[0], [0, 1], [1]])
    ends = ends_by_name(simulate_program(program, costs))
    assert [ends[name] for name in ("0: send 0→1.0", "2: send 2→3.0", "1: send 1→0.0")] == [10, 20, 30]


def test_streams_continue_over_sections_and_steps():
    """Rank 1 is slower, so rank 0 works ahead; every repetition waits only for its own transfer."""
    lead, body, tail = forward(0, cost=1), forward(0, cost=1), forward(0, cost=1)
    send, receive = transfer(0, 1, 0, waits=[body], cost=3, route=0)
    rows = [body, send, receive, forward(1, cost=2, waits=[receive])]
    program, costs = program_of([[lead], rows, [tail]], 2, [0, 10, 25, 4], [[0]])
    timeline = simulate_program(program, costs, 3)
    by_track = {stream: timeline.end_ps[timeline.track == i].tolist() for i, stream in enumerate(timeline.tracks)}
    ends = {(stream.rank, stream.name): values for stream, values in by_track.items()}
    assert ends[0, "compute"] == [10, 20, 30, 40, 50]
    assert ends[0, "send"] == [24, 34, 44]
    assert ends[1, "compute"] == [49, 74, 99]
    assert timeline.step[timeline.track == 0].tolist() == [0, 0, 1, 2, 2]
    assert timeline.step_seconds().tolist() == [49e-12, 25e-12, 25e-12]


def test_receive_shows_the_arrival_of_its_bytes():
    computed = forward(0, cost=1)
    first = transfer(0, 1, 0, waits=[computed], cost=2, route=0)
    second = transfer(0, 1, 1, waits=[], cost=2, route=0)
    program, costs = program_of([[], [computed, *first, *second], []], 2, [0, 5, 10], [[0]])
    timeline = simulate_program(program, costs)
    receives = timeline.opcode == Opcode.RECEIVE_ACTIVATION
    assert timeline.start_ps[receives].tolist() == [5, 15]
    assert timeline.end_ps[receives].tolist() == [15, 25]


def test_a_send_without_its_receive_is_refused():
    send, _ = transfer(0, 1, 3, waits=[], cost=1)
    program, costs = program_of([[], [send], []], 2, [0, 1])
    with pytest.raises(ProgramError, match=r"'send 0→1.3' has no matching receive"):
        simulate_program(program, costs)
    _, receive = transfer(0, 1, 3, waits=[], cost=1)
    complete = transfer(0, 1, 2, waits=[], cost=1)
    program, costs = program_of([[], [receive, *complete], []], 2, [0, 1])
    with pytest.raises(ProgramError, match=r"'receive 0→1.3' has no matching send"):
        simulate_program(program, costs)


def test_a_collective_without_all_members_is_refused():
    rows = [reduction(0, waits=[], cost=1), reduction(0, waits=[], cost=1)]
    program, costs = program_of([[], rows, []], 2, [0, 1], [], [(0, 1)])
    with pytest.raises(ProgramError, match=r"issued by ranks \[0\]; expected \[0, 1\]"):
        simulate_program(program, costs)


def test_more_time_than_the_clock_counts_is_refused():
    program, costs = program_of([[], [forward(0, microbatch, cost=0) for microbatch in range(2)], []], 1, [2**62])
    with pytest.raises(ProgramError, match=r"longer than 2\^63 ps, about 106 days"):
        simulate_program(program, costs, 1)
