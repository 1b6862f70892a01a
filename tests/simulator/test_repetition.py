"""A step that all later ones repeat: told from the first alone, the same as from three."""

import pytest
from hypothesis import given, settings

import meshwright.simulator.plan_simulation as simulate
from meshwright.program import build_program
from meshwright.simulator import estimate_program, simulate_plan
from meshwright.simulator.plan_simulation import step_distance
from meshwright.simulator.simulate import run_program
from tests.graphs import chain_graph
from tests.marks import examples
from tests.simulator.plans import FixedCost, small_cluster
from tests.simulator.replicas import cases, grid, make_plan

US = 1_000_000  # ps


def distance(plan, graph, cost):
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, cost)
    return step_distance(program, costs, run_program(program, costs, 1))


@settings(max_examples=examples(100))
@given(case=cases())
def test_one_step_tells_what_three_do(case):
    plan, graph, cluster, options = case
    found = simulate_plan(plan, graph, cluster, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "step_distance", lambda *_: None)
        whole = simulate_plan(plan, graph, cluster, **options)
    for name in ("step_time_s", "ranks", "memory", "bubble_fraction"):
        assert getattr(found, name) == getattr(whole, name), name


def test_pipelines_repeat_themselves():
    """Four stages, eight microbatches of 3 + 5 µs, 2 µs of optimizer: the last stage is idle between two steps."""
    graph = chain_graph(4)
    plan = make_plan(graph, grid(4, 1), 8, schedule="gpipe")
    assert distance(plan, graph, FixedCost(optimizer=2e-6, send=1e-12)) == ((8 + 3) * 8 + 2) * US + 2 * 3


def test_a_step_that_delays_the_next_is_not_taken_for_all():
    """Two stages of two replicas, one microbatch each, sums of 40 µs: three of the second stage and two of the first.

    Forwards take 6 and 9 µs, so the second stage's sums begin at 6 + 9 + 5 µs and end 120 µs later. The first stage's
    begin when the first of its backwards is done, after 30 + 5 µs, and it is ready again at 115 µs; the second stage
    is wanted 6 µs later, 19 µs too early. Two messages take 1 ps each.
    """
    graph = chain_graph(5)
    plan = make_plan(graph, grid(2, 2), 2, bucket_bytes=1)
    cost = FixedCost(all_reduce=40e-6)
    assert distance(plan, graph, cost) is None
    assert simulate_plan(plan, graph, small_cluster(), cost=cost).step_time_s == pytest.approx(134e-6)
    assert distance(plan, graph, FixedCost(all_reduce=20e-6)) == (35 + 40) * US + 2


def test_processor_time_is_simulated_in_full():
    graph = chain_graph(4)
    plan = make_plan(graph, grid(2, 2), 4)
    assert distance(plan, graph, FixedCost(send=1e-6)) is not None
    assert distance(plan, graph, FixedCost(send=1e-6, host=1e-6)) is None
