"""The simulation of SOAP strategies, against an independent one and itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.methods.flexflow.configure import configure, configure_all
from meshwright.planner.methods.flexflow.full import BEYOND, shortest_tails, simulate_all, simulate_within
from meshwright.planner.methods.flexflow.soap_arrays import END, READY, empty_schedule, empty_strategy
from meshwright.planner.methods.flexflow.soap_spaces import LayerTable, SoapMachine, Weight, assemble
from tests.planner.methods.soap_oracle import simulate
from tests.planner.methods.soap_problems import (
    as_arrays,
    draw_configuration,
    draw_problem,
    draw_strategy,
    make_soap,
)

pytestmark = pytest.mark.long

problems = st.builds(
    lambda seed, num_layers, num_devices, barrier, most: (
        np.random.default_rng(seed),
        {"num_layers": num_layers, "num_devices": num_devices, "barrier": barrier, "most_ps": most},
    ),
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([2, 4, 40, 1000]),
)


def times_of(made, schedule):
    order = schedule.order[: schedule.num_run[0]]
    return {int(task): (int(made.task[task, READY]), int(made.task[task, END])) for task in order}


def simulated(soap, strategy):
    made, schedule = empty_strategy(soap), empty_schedule(soap)
    configure_all(soap, made, *as_arrays(soap, strategy))
    return simulate_all(soap, made, schedule), made, schedule


@given(problems)
def test_simulation_is_that_of_the_oracle(drawn):
    random, options = drawn
    problem = draw_problem(random, **options)
    soap = make_soap(problem)
    strategy = draw_strategy(random, problem[0], options["num_devices"])
    step, made, schedule = simulated(soap, strategy)
    expected, times = simulate(problem, strategy)
    found = times_of(made, schedule)
    assert step == expected
    assert found == {task: times[task] for task in found}
    if not options["barrier"]:
        assert found.keys() == times.keys()


@given(problems, st.floats(0.5, 1.5))
def test_a_step_beyond_the_limit_is_refused_and_no_other(drawn, factor):
    random, options = drawn
    problem = draw_problem(random, **options)
    soap = make_soap(problem)
    strategy = draw_strategy(random, problem[0], options["num_devices"])
    step, made, schedule = simulated(soap, strategy)
    layer, limit = int(random.integers(len(strategy))), int(step * factor)
    strategy[layer] = row, devices = draw_configuration(random, problem[0][layer], len(soap.kind))
    configure(soap, made, layer, soap.candidates[layer] + row, devices)
    found = simulate_within(soap, made, schedule, limit, shortest_tails(soap))
    expected, fresh, _ = simulated(soap, strategy)
    assert found == (BEYOND if expected > limit else expected)
    assert all((a == b).all() for a, b in zip(made[2:5], fresh[2:5], strict=True))


def test_a_ring_moves_twice_all_but_one_share():
    """Two devices, a layer of one weight in two samples' parts: 2 (2 - 1) / 2 of 1000 bytes at 3 ps, two latencies."""
    layer = LayerTable(
        degrees=np.array([[1], [2]]),
        pass_ps=np.array([[[100, 200]], [[50, 100]]]),
        update_ps=np.zeros((2, 1), np.int64),
        held_bytes=np.zeros(2, np.int64),
        trains=True,
    )
    machine = SoapMachine(
        kind=np.zeros(2, np.int64),
        limit_bytes=np.zeros(2, np.int64),
        latency_ps=np.full((2, 2), 7),
        byte_ps=np.full((2, 2), 3.0),
        hops=np.array([[[-1], [0]], [[1], [-1]]]),
        num_links=2,
    )
    for barrier in (False, True):
        soap = assemble([layer], [], [Weight(layer=0, num_bytes=1000, splits=(False,))], machine, barrier=barrier)
        assert simulated(soap, [(1, np.array([0, 1]))])[0] == 50 + 100 + 2 * (7 + 500 * 3)
        assert simulated(soap, [(0, np.array([1]))])[0] == 300
        assert simulated(soap, [(1, np.array([1, 1]))])[0] == 300


@pytest.mark.parametrize("barrier", [False, True])
def test_syncs_overlap_only_without_a_barrier(barrier):
    random = np.random.default_rng(3)
    gains = 0
    for _ in range(20):
        layers, edges, weights, machine, _ = draw_problem(random)
        strategy = draw_strategy(random, layers, 4)
        steps = [simulated(make_soap((layers, edges, weights, machine, b)), strategy)[0] for b in (barrier, True)]
        gains += steps[0] < steps[1]
    assert gains == 0 if barrier else gains > 10
