"""The lower bound of step times: no plan beats it, and where nothing is lost it is reached."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem, compare_schedules
from meshwright.planner.step_bounds import bound_space
from meshwright.simulator import simulate_plan
from meshwright.spec import Workload
from tests.marks import examples
from tests.planner.searching import search_plans
from tests.planner.test_search import cluster_of, every_plan, weighted_graph

OTHERS = ("zb-h1", "zb-h2", "interleaved", "looped-bfs", "zb-v", "dualpipe", "dualpipe-v", "pipedream", "pipedream-2bw")


def bound_of(graph, cluster, batch, schedules=("gpipe", "1f1b"), cost=None):
    problem = Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(kind=graph.mode, global_batch=batch),
        cost=cost or CostModel(cluster=cluster),
        choices=Choices(schedules=schedules),
    )
    (space,) = problem.spaces()
    return bound_space(space)


@settings(max_examples=examples(25), deadline=None)
@given(
    flops=st.lists(st.integers(10**7, 10**9), min_size=1, max_size=4),
    counts=st.sampled_from([(1,), (2,), (3,), (2, 1)]),
    rates=st.sampled_from([(1e12,), (1e12, 3e11)]),
    batch=st.sampled_from([2, 4, 6]),
    width=st.sampled_from([4, 64, 512]),
)
def test_no_plan_is_faster(flops, counts, rates, batch, width):
    graph, cluster = weighted_graph(flops, width=width), cluster_of(*counts, rates=rates)
    cost = CostModel(cluster=cluster)
    bound_s = bound_of(graph, cluster, batch, cost=cost)
    plans = list(every_plan(graph, cluster, batch))
    assume(plans)
    best = min(simulate_plan(plan, graph, cluster, cost=cost).step_time_s for plan in plans)
    assert 0 < bound_s <= best


@pytest.mark.parametrize("schedule", OTHERS)
def test_other_schedules_have_bounds_of_their_own(schedule):
    graph, cluster = weighted_graph([10**8, 3 * 10**8, 10**8, 2 * 10**8] * 2), cluster_of(2)
    plans = [plan for plan in every_plan(graph, cluster, 8) if len(plan.stages) == 2 and plan.schedule == "1f1b"]
    bound_s = bound_of(graph, cluster, 8, schedules=(schedule,))
    for plan in [plan for plan in plans if plan.num_microbatches == 8][::3]:
        (_, other) = compare_schedules(plan, graph, cluster, [schedule])
        assert bound_s <= other.step_time_s


def test_it_is_reached_where_nothing_is_lost():
    """Replicas of a model without weight: all that there is to do, shared out evenly."""
    graph, cluster = weighted_graph([10**9] * 4, width=1), cluster_of(4)
    plans = search_plans(lambda _: graph, cluster, Workload(global_batch=64), microbatch_sizes=[1])
    assert plans.bound_s <= plans.best.step_time_s <= plans.bound_s * 1.01
    assert plans.gap == plans.best.step_time_s / plans.bound_s - 1


def test_it_knows_that_one_layer_is_not_shared_by_stages():
    """A pipeline is at best as fast as its slowest layer, whatever the mean says."""
    graph, cluster = weighted_graph([1, 10**9, 1], width=1), cluster_of(3)
    alone_s = simulate_plan(next(every_plan(graph, cluster_of(1), 1)), graph, cluster_of(1)).step_time_s
    assert alone_s * 0.98 < bound_of(graph, cluster, 1) <= alone_s
