"""Changes of durations: always the ends of a full simulation, bit for bit, with and without taking back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator.delta import DeltaSimulation
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import collectives, durations, routes, with_durations
from meshwright.simulator.unroll import unroll
from meshwright.spec import ProgramError
from tests.marks import examples
from tests.simulator.builders import forward, program_of, random_program, reduction, transfer

seeds = st.integers(0, 2**31)


def network_of(seed, size, num_steps, *, shared=False, joins=False):
    """Of a random program; unless shared, no link counts as wanted by others."""
    program, costs = random_program(seed, size, joins=joins)
    unrolled = unroll(program, costs, num_steps)
    network = unrolled.network
    return network if shared else network._replace(num_private=len(network.route_offsets) - 1), unrolled.num_links


def full_ends(network, num_links, contention, duration_ps):
    """With all durations; a mark keeps its share of its instruction, and 1 ps where a link is held."""
    before = durations(network)
    shifts = []
    for i, shift in zip(network.mark_instruction.tolist(), network.mark_shift_ps.tolist(), strict=True):
        offset = duration_ps[i] if before[i] == 0 else round((before[i] + shift) * (duration_ps[i] / before[i]))
        shifts.append(min(max(offset, int(routes(network)[i] >= 0)), duration_ps[i]) - duration_ps[i])
    changed = with_durations(network, duration_ps, np.array(shifts, np.int64))
    return run_network(changed, num_links, contention).end_ps


def draw_change(rng, network, duration_ps):
    """One to three instructions and what they shall take; members of a collective together."""
    ids = rng.choice(len(duration_ps), rng.integers(1, min(3, len(duration_ps)) + 1), replace=False)
    wanted = rng.integers(routes(network)[ids] >= 0, 9)
    after = duration_ps.copy()
    for i, value in zip(ids, wanted, strict=True):
        c = collectives(network)[i]
        after[[i] if c < 0 else collectives(network) == c] = value
    return ids, wanted, after


def assert_equal_to_full_runs(seed, network, num_links, contention) -> list[bool]:
    rng, full = np.random.default_rng(seed), []
    simulation = DeltaSimulation(network, num_links, contention)
    duration_ps = durations(network)
    for _ in range(8):
        ids, wanted, after = draw_change(rng, network, duration_ps)
        before = simulation.end_ps.copy()
        simulation.change(ids, wanted)
        full.append(simulation.was_full)
        assert np.array_equal(simulation.end_ps, full_ends(network, num_links, contention, after))
        if rng.random() < 0.5:
            simulation.undo()
            assert np.array_equal(simulation.end_ps, before)
        else:
            duration_ps = after
        assert np.array_equal(durations(simulation.network), duration_ps)
    assert np.array_equal(simulation.end_ps, full_ends(network, num_links, contention, duration_ps))
    return full


@pytest.mark.parametrize("share", [0.0125, 0.3, 1.0])
@settings(max_examples=examples(80))
@given(seed=seeds, size=st.integers(2, 40), num_steps=st.integers(1, 3))
@pytest.mark.matrix
def test_delta_equals_a_full_run(share, seed, size, num_steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.simulator.delta.durations.SWEEP", share)
        network, num_links = network_of(seed, size, num_steps)
        full = assert_equal_to_full_runs(seed, network, num_links, "queued")
    assert share < 1 or not any(full)


@pytest.mark.parametrize("share", [0.0125, 1.0])
@settings(max_examples=examples(60))
@given(seed=seeds, size=st.integers(2, 30), contention=st.sampled_from(["queued", "fair"]), joins=st.booleans())
@pytest.mark.matrix
def test_delta_equals_a_full_run_where_order_matters(share, seed, size, contention, joins):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.simulator.delta.durations.GIVE_UP", share)
        network, num_links = network_of(seed, size, 2, shared=True, joins=joins)
        full = assert_equal_to_full_runs(seed, network, num_links, contention)
    is_shared = (routes(network) >= network.num_private).any()
    assert all(full) or not (len(network.join_instruction) or (is_shared and contention == "fair"))


def chain(num_ranks, length):
    rows = [[forward(rank, microbatch, cost=1) for microbatch in range(length)] for rank in range(num_ranks)]
    program, costs = program_of([[], [row for rank in rows for row in rank], []], num_ranks, [0, 10])
    unrolled = unroll(program, costs, 1)
    return unrolled.network, unrolled.num_links


def two_requests(first_ps, second_ps):
    """Two ranks compute and then want the same link for 10 ps; both sends are awaited."""
    rows = [forward(rank, cost=rank) for rank in range(2)]
    for rank in range(2):
        rows += transfer(rank, 2, 0, waits=[rows[rank]], cost=2, route=0)
    program, costs = program_of([[], rows, []], 3, [first_ps, second_ps, 10], routes=[[0]])
    unrolled = unroll(program, costs, 1)
    computed, sent = np.flatnonzero(routes(unrolled.network) < 0)[:2], np.flatnonzero(routes(unrolled.network) >= 0)
    return DeltaSimulation(unrolled.network, unrolled.num_links), computed, sent


def test_requests_that_stay_in_order_are_followed(monkeypatch):
    """Requests at 5 and 8; at equal times the lower stream comes first."""
    monkeypatch.setattr("meshwright.simulator.delta.durations.GIVE_UP", 1.0)
    simulation, computed, sent = two_requests(5, 8)
    assert simulation.end_ps[sent].tolist() == [15, 25]
    for duration, ends, is_full in ((8, [18, 28], False), (9, [28, 18], True), (2, [12, 22], False)):
        simulation.change(computed[0], duration)
        assert simulation.end_ps[sent].tolist() == ends
        assert simulation.was_full == is_full
        simulation.undo()
        assert simulation.end_ps[sent].tolist() == [15, 25]
    # What was taken back counts no more: the second request comes before 5 now, not before 2.
    simulation.change(computed[0], 2)
    simulation.undo()
    simulation.change(computed[1], 4)
    assert simulation.end_ps[sent].tolist() == [24, 14]
    simulation.undo()
    for duration, ends in ((9, [28, 18]), (30, [40, 18]), (1, [11, 21])):
        simulation.change(computed[0], duration)
        assert simulation.end_ps[sent].tolist() == ends


def test_few_are_looked_at_and_the_rest_is_swept(monkeypatch):
    """Of 2 x 100 instructions 8 are a share of 0.04: the whole of a longer tail is gone through, and so noted."""
    monkeypatch.setattr("meshwright.simulator.delta.durations.SWEEP", 0.04)
    simulation = DeltaSimulation(*chain(2, 100))
    for first in (192, 191):
        simulation.change(first, 25)
        assert not simulation.was_full
        start = 10 * (first - 100)
        assert simulation.end_ps[[first - 1, first, 199]].tolist() == [start, start + 25, 1015]
        simulation.undo()
        assert simulation.end_ps[[99, 199]].tolist() == [1000, 1000]


def test_a_member_speaks_for_its_collective():
    rows = [reduction(0, waits=[], cost=1), reduction(1, waits=[], cost=1)]
    program, costs = program_of([[], rows, []], 2, [0, 10], groups=[(0, 1)])
    unrolled = unroll(program, costs, 1)
    simulation = DeltaSimulation(unrolled.network, unrolled.num_links)
    simulation.change([1], [7])
    assert simulation.end_ps.tolist() == [7, 7]


def test_changes_that_cannot_be():
    simulation = DeltaSimulation(*chain(1, 3))
    with pytest.raises(ProgramError, match="No change is left to take back"):
        simulation.undo()
    simulation.change(0, 5)
    simulation.undo()
    with pytest.raises(ProgramError, match="only the last one can be, once"):
        simulation.undo()
    with pytest.raises(ProgramError, match="was to take -1 ps"):
        simulation.change([0, 1], [3, -1])
    for ids, wanted in (([3], [1]), ([-1], [1]), ([0, 1], [1]), ([], [])):
        with pytest.raises(ProgramError, match=f"{len(wanted)} durations were given for {len(ids)} instructions"):
            simulation.change(np.array(ids, np.int64), wanted)
    assert simulation.end_ps.tolist() == [10, 20, 30]


@pytest.mark.parametrize("wanted", [1.9, [1.0], [np.float32(2)], 2**63, 2**70, -(2**63) - 1, np.uint64(2**63), "7"])
def test_durations_are_whole_numbers(wanted):
    simulation = DeltaSimulation(*chain(1, 3))
    with pytest.raises(ProgramError, match="expected whole ones that fit into 64 bits"):
        simulation.change(0, wanted)
    with pytest.raises(ProgramError, match="expected whole ones"):
        simulation.change(wanted, 1)
    assert simulation.end_ps.tolist() == [10, 20, 30]


def test_ends_fit_into_63_bits():
    """In one change or several, less what was taken back; what gets shorter makes no room for others."""
    simulation, half = DeltaSimulation(*chain(1, 3)), 2**60
    for ids, wanted in ((0, 2**62), ([0, 1, 2], [2**62] * 3), ([0, 1], [10 + half] * 2)):
        with pytest.raises(ProgramError, match="all together; expected less than 2305843009213693952 ps"):
            simulation.change(ids, wanted)
    simulation.change(1, 10 + half)
    simulation.undo()
    simulation.change([0, 1], [10 + half, 0])
    with pytest.raises(ProgramError, match="all together"):
        simulation.change(2, 10 + half)
    simulation.change(2, 9 + half)
    assert simulation.end_ps.tolist() == [10 + half, 10 + half, 19 + 2 * half]
    simulation.change([0, 2], [10, 9 + half])
    simulation.change(1, 10 + half)
    assert simulation.end_ps.tolist() == [10, 20 + half, 29 + 2 * half]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_ends_are_to_be_read(share, monkeypatch):
    monkeypatch.setattr("meshwright.simulator.delta.durations.GIVE_UP", share)
    simulation, computed, _ = two_requests(5, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            simulation.end_ps[0] = 999
        simulation.change(computed[0], 6)


def test_an_unknown_model_of_contention():
    with pytest.raises(ProgramError, match="model of contention 'far'"):
        DeltaSimulation(*chain(1, 3), "far")


def test_a_link_is_held_for_a_picosecond_at_least():
    for seed in range(20):
        network, num_links = network_of(seed, 20, 1)
        held = np.flatnonzero(routes(network) >= 0)
        if len(held):
            with pytest.raises(ProgramError, match="at least 1 where it holds a link"):
                DeltaSimulation(network, num_links).change(held[0], 0)


def test_a_program_that_never_finishes_is_refused():
    first, second = forward(0, 0, cost=1), forward(1, 0, cost=1)
    first.waits, second.waits = [second], [first]
    unrolled = unroll(*program_of([[], [first, second], []], 2, [0, 10]), 1)
    with pytest.raises(ProgramError, match="never finishes"):
        DeltaSimulation(unrolled.network, unrolled.num_links)
