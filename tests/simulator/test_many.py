"""Many plans at once: each as if it were alone, errors too."""

import os
from dataclasses import replace

import pytest

import meshwright.simulator.many as module
from meshwright.planner import compare_schedules
from meshwright.simulator import simulate_plan, simulate_plans
from meshwright.spec import GraphMismatchError, PlanError, ProgramError
from tests.graphs import chain_graph
from tests.simulator.plans import FixedCost, small_cluster
from tests.simulator.replicas import grid, make_plan
from tests.simulator.test_folding import assert_same


@pytest.fixture
def plans():
    graph = chain_graph(8)
    found = [
        make_plan(graph, grid(stages, replicas), 8, schedule=schedule)
        for stages, replicas in ((1, 2), (2, 2), (2, 4), (4, 2), (8, 1))
        for schedule in ("gpipe", "1f1b")
    ]
    # One that is for another graph, and one for more devices than there are.
    return graph, [*found[:4], replace(found[0], graph_hash="0" * 16), make_plan(graph, grid(3, 3), 9), *found[4:]]


@pytest.mark.parametrize("num_processes", [None, 1, 2, 3])
def test_each_is_as_if_it_were_alone(plans, num_processes):
    graph, many = plans
    cluster = small_cluster()
    cost = FixedCost(send=1e-6, all_reduce=2e-6)
    found = simulate_plans(many, graph, cluster, cost=cost, num_steps=2, num_processes=num_processes)
    assert len(found) == len(many)
    wrong = {4: GraphMismatchError, 5: PlanError}
    for place, (plan, result) in enumerate(zip(many, found, strict=True)):
        if place in wrong:
            with pytest.raises(wrong[place]) as alone:
                simulate_plan(plan, graph, cluster, cost=cost)
            assert type(result) is wrong[place]
            assert str(result) == str(alone.value)
        else:
            assert_same(result, simulate_plan(plan, graph, cluster, cost=cost, num_steps=2))


def test_other_processes_do_the_work(plans, monkeypatch):
    """All but the first plan run in processes other than this one."""
    graph, many = plans
    monkeypatch.setattr(module, "simulate_plan", lambda *_, **__: os.getpid())
    mine, *others = simulate_plans(many, graph, small_cluster(), num_processes=2)
    assert mine == os.getpid()
    assert mine not in others
    assert len(set(others)) <= 2
    assert set(simulate_plans(many, graph, small_cluster(), num_processes=1)) == {os.getpid()}


def test_a_killed_process_is_told(plans, monkeypatch):
    graph, many = plans
    here = os.getpid()
    monkeypatch.setattr(module, "simulate_plan", lambda *_, **__: None if os.getpid() == here else os._exit(9))
    with pytest.raises(ProgramError, match="num_processes=1"):
        simulate_plans(many, graph, small_cluster(), num_processes=2)


def test_no_plans_and_no_processes():
    graph = chain_graph(2)
    assert simulate_plans([], graph, small_cluster()) == ()
    with pytest.raises(ProgramError, match="num_processes is 0"):
        simulate_plans([], graph, small_cluster(), num_processes=0)


def test_schedules_that_are_compared_are_as_if_alone(plans):
    graph, many = plans
    items = compare_schedules(many[2], graph, small_cluster(), ["1f1b", "zb-h1"], cost=FixedCost())
    assert [item.plan.schedule for item in items] == ["gpipe", "1f1b", "zb-h1"]
    for item in items:
        alone = simulate_plan(item.plan, graph, small_cluster(), cost=FixedCost())
        assert item.step_time_s == alone.step_time_s
        assert item.memory == alone.memory
