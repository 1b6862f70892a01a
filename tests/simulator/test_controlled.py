"""Controlled runs against plain event-driven simulations that ask the same controller, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import simulate_controlled
from meshwright.spec import DeadlockError
from tests.simulator.builders import RECEIVES, random_program
from tests.simulator.oracle_controlled import ControlledFairOracle, ControlledOracle
from tests.simulator.random_controllers import RandomController, RandomCosts

ORACLES = {"queued": ControlledOracle, "fair": ControlledFairOracle}
seeds = st.integers(0, 2**31)
contentions = st.sampled_from(sorted(ORACLES))


def draw(seed, size, **facts):
    program, prices = random_program(seed, size, joins=seed % 2 == 1, body_alone=True)
    controller = RandomController(
        seed=seed, num_ranks=program.num_ranks, num_marks=len(program.body.mark_instruction), **facts
    )
    return program, prices, controller, RandomCosts(seed, len(prices.route_offsets) - 1)


@pytest.mark.parametrize("contention", sorted(ORACLES))
@settings(max_examples=300)
@given(seed=seeds, size=st.integers(0, 20), may_deadlock=st.booleans())
def test_a_controlled_run_equals_the_oracle(contention, seed, size, may_deadlock):
    program, prices, controller, costs = draw(seed, size, may_deadlock=may_deadlock)
    oracle = ORACLES[contention](program, prices, controller, costs)
    expected = oracle.ends()
    if None in expected:
        with pytest.raises(DeadlockError):
            simulate_controlled(program, prices, controller, costs, contention=contention)
        return
    run = simulate_controlled(program, prices, controller, costs, contention=contention)
    assert run.timeline.end_ps.tolist() == expected
    arrivals = np.isin(run.timeline.opcode, RECEIVES)
    assert run.timeline.start_ps[~arrivals].tolist() == np.array(oracle.starts())[~arrivals].tolist()
    assert run.log.now_ps.tolist() == [now for _, now, _ in oracle.decided]
    assert [run.log.decision(k) for k in range(run.log.num_decisions)] == [what for _, _, what in oracle.decided]
