"""The critical path against longest chains by definition, and closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import Bound
from meshwright.simulator.critical_path import find_critical_path
from meshwright.simulator.network import awaited_instructions, collectives, durations
from meshwright.simulator.simulate import run_unrolled
from meshwright.simulator.simulation import step_window
from meshwright.simulator.unroll import unroll
from meshwright.spec import ProgramError
from tests.marks import examples
from tests.simulator.builders import random_program
from tests.simulator.path_oracle import LINK, MARK, STREAM, WAIT, PathOracle

seeds = st.integers(0, 2**31)


def run(program, costs, num_steps):
    """What the path is found from: network, starts without the arrival of bytes, ends and steps."""
    unrolled = unroll(program, costs, num_steps)
    network, _, end_ps = run_unrolled(program, unrolled, costs.host_ps)
    return network, end_ps - durations(network), end_ps, unrolled.step


@settings(max_examples=examples(300))
@given(seed=seeds, size=st.integers(1, 25), num_steps=st.integers(1, 3), joins=st.booleans())
def test_the_path_is_the_longest_chain(seed, size, num_steps, joins):
    program, costs = random_program(seed, size, joins=joins)
    network, start_ps, end_ps, _ = run(program, costs, num_steps)
    oracle = PathOracle(program, costs, num_steps)
    assert end_ps.tolist() == oracle.ends()
    known = {}
    for key, start in zip(oracle.order, start_ps.tolist(), strict=True):
        assert oracle.longest(known, key) == start
    stop = int(end_ps.max())
    path = find_critical_path(network, start_ps, end_ps, (0, stop))
    assert int((path.end_ps - path.start_ps).sum()) == stop


@settings(max_examples=examples(500))
@given(seed=seeds, size=st.integers(1, 25), num_steps=st.integers(1, 3), joins=st.booleans())
def test_the_path_is_the_chain_that_the_order_of_ties_picks(seed, size, num_steps, joins):
    """In the window of the last step: every segment tight, none left out, lengths that add up exactly."""
    program, costs = random_program(seed, size, joins=joins)
    network, start_ps, end_ps, step = run(program, costs, num_steps)
    oracle = PathOracle(program, costs, num_steps)
    oracle.ends()
    begin, stop = step_window(step, end_ps)
    path = find_critical_path(network, start_ps, end_ps, (begin, stop))
    found = list(zip(*(column.tolist() for column in (path.instruction, path.start_ps, path.end_ps)), strict=True))
    if begin == stop:
        assert not found
        return
    expected = oracle.chain(begin, stop)
    assert [(*segment, bound) for segment, bound in zip(found, path.bound.tolist(), strict=True)] == expected
    assert sum(end - start for _, start, end in found) == stop - begin


def test_random_programs_have_paths_of_every_kind():
    kinds = set()
    for seed in range(20):
        network, start_ps, end_ps, _ = run(*random_program(seed, 25), 2)
        kinds |= set(find_critical_path(network, start_ps, end_ps, (0, int(end_ps.max()))).bound.tolist())
    # Hosts are in test_host_issue.py.
    assert kinds == set(Bound) - {Bound.HOST}
    assert (STREAM, WAIT, MARK, LINK) == (Bound.STREAM, Bound.WAIT, Bound.MARK, Bound.LINK)


def test_times_of_another_simulation_are_refused():
    network, start_ps, end_ps, _ = run(*random_program(3, 25), 1)
    later = np.where(end_ps == end_ps.max(), 1, 0)
    with pytest.raises(ProgramError, match="nothing that it needs happens then"):
        find_critical_path(network, start_ps + later, end_ps + later, (0, int(end_ps.max()) + 1))
    with pytest.raises(ProgramError, match="No instruction ends at"):
        find_critical_path(network, start_ps, end_ps, (0, int(end_ps.max()) + 1))


@settings(max_examples=examples(300))
@given(seed=seeds, size=st.integers(1, 25), joins=st.booleans())
@pytest.mark.long
def test_the_path_where_links_are_shared_fairly(seed, size, joins):
    """Each segment needs the one before it, nothing is left out, and nobody waits for a link."""
    program, costs = random_program(seed, size, joins=joins)
    unrolled = unroll(program, costs, 2)
    network, start_ps, end_ps = run_unrolled(program, unrolled, costs.host_ps, "fair")
    start_ps = np.where(unrolled.send_of >= 0, end_ps - durations(network), start_ps)
    begin, stop = step_window(unrolled.step, end_ps)
    path = find_critical_path(network, start_ps, end_ps, (begin, stop))
    assert int((path.end_ps - path.start_ps).sum()) == stop - begin
    assert Bound.LINK not in path.bound
    collective = collectives(network)
    segments = list(zip(path.instruction.tolist(), path.end_ps.tolist(), strict=True))
    for (before, until), (i, _), bound in zip(segments, segments[1:], path.bound[1:].tolist(), strict=False):
        assert start_ps[i] == until
        waits = network.waits[slice(*network.wait_offsets[i : i + 2])]
        needed = [i - 1] if bound == Bound.STREAM else awaited_instructions(network, waits).tolist()
        together = collective[before]
        members = [before] if together < 0 else np.flatnonzero(collective == together).tolist()
        assert set(members) & set(needed)
        assert bound == Bound.MARK or end_ps[before] == until
        assert start_ps[before] <= until <= end_ps[before]
