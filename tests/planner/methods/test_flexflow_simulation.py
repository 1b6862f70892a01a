"""The simulations of SOAP strategies: the full one against an independent one, changes against the full one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.methods.flexflow.chain import (
    begin_change,
    keep,
    release,
    simulate_change,
    take_back,
)
from meshwright.planner.methods.flexflow.configure import configure, configure_all
from meshwright.planner.methods.flexflow.full import BEYOND, NO_LIMIT, shortest_tails, simulate_all
from meshwright.planner.methods.flexflow.soap_arrays import COUNT, END, READY, ROW, empty_schedule, empty_strategy
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
    order = schedule.order[schedule.state[ROW], : schedule.state[COUNT]]
    return {int(task): (int(made.task[task, READY]), int(made.task[task, END])) for task in order}


def simulated(soap, strategy):
    made, schedule = empty_strategy(soap), empty_schedule(soap)
    configure_all(soap, made, *as_arrays(soap, strategy))
    return simulate_all(soap, made, schedule), made, schedule


@given(problems)
def test_full_simulation_is_that_of_the_oracle(drawn):
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


def change(random, problem, soap, strategy, made, schedule, num_layers, limit=NO_LIMIT, gives_up=False):
    """Change some layers at random; the new strategy and its step time."""
    changed = np.sort(random.choice(len(strategy), min(num_layers, len(strategy)), replace=False))
    new = list(strategy)
    begin_change(schedule)
    for layer in changed:
        release(soap, made, schedule, layer)
    for layer in changed:
        new[layer] = row, devices = draw_configuration(random, problem[0][layer], len(soap.kind))
        configure(soap, made, layer, soap.candidates[layer] + row, devices)
    return new, simulate_change(soap, made, schedule, changed, limit, shortest_tails(soap), gives_up)


@settings(deadline=None)
@given(problems, st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_changes_are_simulated_bit_for_bit(drawn, changes):
    random, options = drawn
    problem = draw_problem(random, **options)
    soap = make_soap(problem)
    strategy = draw_strategy(random, problem[0], options["num_devices"])
    _, made, schedule = simulated(soap, strategy)
    for num_layers, is_kept, gives_up in changes:
        new, step = change(random, problem, soap, strategy, made, schedule, num_layers, gives_up=gives_up)
        expected, fresh, full = simulated(soap, new)
        assert step == expected
        if is_kept:
            strategy = new
            keep(schedule)
        else:
            take_back(made, schedule)
            configure_all(soap, made, *as_arrays(soap, strategy))
            _, fresh, full = simulated(soap, strategy)
        assert times_of(made, schedule) == times_of(fresh, full)
        order = [s.order[s.state[ROW], : s.state[COUNT]].tolist() for s in (schedule, full)]
        assert order[0] == order[1]
        assert all((a == b).all() for a, b in zip(made[2:5], fresh[2:5], strict=True))


@given(problems, st.floats(0.5, 1.5), st.booleans())
def test_a_change_beyond_the_limit_is_refused_and_no_other(drawn, factor, gives_up):
    random, options = drawn
    problem = draw_problem(random, **options)
    soap = make_soap(problem)
    strategy = draw_strategy(random, problem[0], options["num_devices"])
    step, made, schedule = simulated(soap, strategy)
    before, limit = times_of(made, schedule), int(step * factor)
    new, found = change(random, problem, soap, strategy, made, schedule, 1, limit, gives_up)
    expected = simulated(soap, new)[0]
    assert found == (BEYOND if expected > limit else expected)
    take_back(made, schedule)
    assert times_of(made, schedule) == before


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
