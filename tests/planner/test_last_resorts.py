"""Offload is searched only where nothing fits the devices alone."""

from meshwright.cost import CostModel
from meshwright.planner import Limits, Problem, search_plans, whole_space
from meshwright.spec import Workload, load_cluster, load_shipped_graph
from meshwright.spec.offload import ON_DEVICE


def test_a_restricted_search_offloads_nothing_that_fits():
    """Few settings, which the grid does not look at first."""
    cluster, workload = load_cluster("2xcpu"), Workload(global_batch=8)
    graph = load_shipped_graph("gpt-tiny")
    choices = whole_space(
        graph, cluster, workload, tensor=(1,), context=(1,), zero=(0,), recompute=("none",), microbatch_sizes=(2,)
    )
    assert choices.last_resorts
    cost = CostModel(cluster=cluster, precision="float32")
    problem = Problem(graph_for=lambda _: graph, cluster=cluster, workload=workload, cost=cost, choices=choices)
    found = search_plans(problem, limits=Limits(max_plans=4))
    assert {item.plan.offload for item in found.ranked} == {ON_DEVICE}
