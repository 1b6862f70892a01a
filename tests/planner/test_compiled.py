"""Searches whose plans compile their layers."""

from dataclasses import replace

import pytest

from meshwright.planner import Choices, Limits, Problem, evaluate_plan, replan, search_plans
from meshwright.spec import Sharding, Workload, load_shipped_graph
from tests.simulator.plans import fast_cluster

GRAPH = load_shipped_graph("gpt2-small")
CLUSTER = fast_cluster("4xH100")


def problem_of(*, compiled, **choices):
    return Problem(
        graph_for=lambda _: GRAPH,
        cluster=CLUSTER,
        workload=Workload(global_batch=16, precision="amp"),
        choices=Choices(**choices),
        compiled=compiled,
    )


@pytest.mark.parametrize("method", ["auto", "slicing", "grid", "alpa"])
def test_plans_are_compiled_and_estimated_so(method):
    choices = {"recompute": ("none", "full"), "zero": (0, 3)} if method in ("auto", "grid") else {}
    found = {
        each: search_plans(problem_of(compiled=each, **choices), method, Limits(max_plans=3)) for each in (False, True)
    }
    for item in found[True].ranked:
        assert item.plan.compiled
        assert item.plan.graph_hash == GRAPH.content_hash
        again = evaluate_plan(item.plan, GRAPH, CLUSTER, problem_of(compiled=True).cost)
        assert again.step_time_s == item.step_time_s
    assert not found[False].best.plan.compiled
    assert found[True].best.step_time_s < found[False].best.step_time_s


def test_split_ops_are_compiled_between_exchanges():
    choices = {"shardings": (Sharding(tensor=2),)}
    best = search_plans(problem_of(compiled=True, **choices), "slicing", Limits(max_plans=8))
    split = [item for item in best.ranked if item.plan.sharding.tensor == 2]
    assert split
    for item in split:
        eager = replace(item.plan, compiled=False)
        assert item.step_time_s < evaluate_plan(eager, GRAPH, CLUSTER, problem_of(compiled=True).cost).step_time_s


def test_a_plan_that_is_found_anew_stays_compiled():
    problem = problem_of(compiled=True)
    best = search_plans(problem, "slicing", Limits(max_plans=1)).best.plan
    assert replan(best, lambda _: GRAPH, problem.cost).best.plan.compiled
