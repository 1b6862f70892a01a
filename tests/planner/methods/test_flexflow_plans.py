"""The chain over plans: legal, seeded, as good as the exact method on small problems."""

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem, SearchState
from meshwright.planner.methods.flexflow import flexflow
from meshwright.spec import Sharding, Workload, check_plan, load_cluster, load_shipped_graph
from tests.graphs import chain_graph
from tests.planner.searching import search_plans, solve
from tests.simulator.plans import fast_cluster


def search(graph, cluster, batch, method=flexflow, **options):
    cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return search_plans(lambda _: graph, cluster, Workload(global_batch=batch), method=method, **options)


def test_it_finds_what_exact_slicing_finds_on_a_small_problem():
    graph = chain_graph(6, width=2048)
    for cluster in ("2xA100", "3xA100"):
        exact, ours = search(graph, cluster, 12, "slicing"), search(graph, cluster, 12)
        assert ours.best.step_time_s <= 1.02 * exact.best.step_time_s


def test_it_only_yields_legal_plans_and_none_twice():
    graph, cluster = load_shipped_graph("gpt-tiny"), load_cluster("2x2xA100")
    problem = Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=8),
        cost=CostModel(cluster=cluster),
        choices=Choices(
            shardings=(Sharding(), Sharding(tensor=2)),
            zero=(0, 1),
            recompute=("none", "full"),
            schedules=("gpipe", "1f1b", "interleaved", "zb-h1"),
        ),
    )
    state = SearchState(random=np.random.default_rng(1))
    steps, seen, result = flexflow(problem, state), [], None
    evaluate = solve(problem, "slicing", max_plans=1).evaluate
    try:
        while len(seen) < 60:
            plan = steps.send(result).plan
            check_plan(plan, graph, cluster)
            assert plan.num_devices == 4
            seen.append(plan)
            result = evaluate(plan)
    except StopIteration:
        pass
    assert len(set(seen)) == len(seen) > 20
    assert {plan.sharding.tensor for plan in seen} == {1, 2}
    assert {plan.exchange.zero for plan in seen} == {0, 1}
    assert {bool(plan.recompute) for plan in seen} == {False, True}
    assert len({plan.schedule for plan in seen}) > 2
    assert seen[0].describe().startswith("1 stage")


@pytest.mark.long
def test_the_same_seed_walks_the_same_way():
    # The search knows devices and links; how hosts keep up with so small a model it does not.
    graph, cluster = load_shipped_graph("resnet-tiny"), fast_cluster("4xA100")
    results = [search(graph, cluster, 8, seed=seed) for seed in (0, 0, 1)]
    assert [item.plan for item in results[0].ranked] == [item.plan for item in results[1].ranked]
    assert results[0].coverage.num_simulated == results[1].coverage.num_simulated
    assert results[0].best.step_time_s <= 1.05 * search(graph, cluster, 8, "slicing").best.step_time_s


def test_choices_that_are_fixed_stay_fixed():
    found = search(
        load_shipped_graph("vgg-tiny"), "4xA100", 8, num_stages=[2], microbatch_sizes=[2], schedules=["gpipe"]
    )
    for item in found.ranked:
        assert (len(item.plan.stages), item.plan.microbatch_size, item.plan.schedule) == (2, 2, "gpipe")


def test_one_device_and_one_op():
    assert search(chain_graph(1), "A100", 1).best.plan.num_devices == 1


@pytest.mark.parametrize("deadline_s", [0.01, 0.5])
def test_it_stops_at_the_deadline(deadline_s):
    assert search(load_shipped_graph("resnet-tiny"), "4xA100", 8, deadline_s=deadline_s).best is not None
