"""Plans for machines that changed, from the plan that there was: legal, close to those found anew, the same twice."""

import pytest

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.planner import Limits, replan
from meshwright.simulator.scenarios import apply_scenario
from meshwright.spec import Offload, PlanError, Sharding, Workload, check_plan, load_cluster, load_shipped_graph
from meshwright.spec.scenario import Scenario, SlowLink
from meshwright.spec.selectors import Links
from tests.planner.searching import search_plans
from tests.planner.test_search import cluster_of, weighted_graph


@pytest.fixture(scope="module")
def gpt():
    return load_shipped_graph("gpt2-xl")


def planned(graph, cluster, batch, **options):
    workload = Workload(global_batch=batch, precision="bfloat16")
    cost = CostModel(cluster=cluster, precision="bfloat16")
    options = {"method": "slicing", "max_plans": 2, **options}
    return search_plans(lambda _: graph, cluster, workload, cost=cost, **options).best.plan, cost


@pytest.mark.parametrize("lost", [(3,), (0, 1), (8, 9, 10, 11, 12, 13, 14, 15)])
@pytest.mark.matrix
def test_lost_devices(gpt, lost):
    plan, cost = planned(gpt, load_cluster("2x8xA100"), 64, microbatch_sizes=(1, 2, 4))
    left = without_devices(cost, lost)
    found = replan(plan, lambda _: gpt, left, limits=Limits(max_plans=4))
    check_plan(found.best.plan, gpt, left.cluster)
    assert found.best.fits
    anew = search_plans(
        lambda _: gpt, left.cluster, plan.workload, cost=left, microbatch_sizes=(1, 2, 4), method="slicing", max_plans=4
    )
    assert found.best.step_time_s <= 1.05 * anew.best.step_time_s


def test_added_devices():
    graph = weighted_graph([10**9] * 6, width=64)
    plan, _ = planned(graph, cluster_of(4), 32)
    larger = CostModel(cluster=cluster_of(8), precision="bfloat16")
    found = replan(plan, lambda _: graph, larger, limits=Limits(max_plans=4))
    assert found.best.plan.num_ranks == 8


@pytest.mark.long
def test_a_slow_link(gpt):
    plan, cost = planned(gpt, load_cluster("2x4xA100"), 32, microbatch_sizes=(1, 2))
    assert len(plan.stages) == 1
    slow = apply_scenario(cost, Scenario(effects=(SlowLink(links=Links("between nodes"), factor=200.0),)))
    found = replan(plan, lambda _: gpt, slow, limits=Limits(max_plans=4))
    assert found.best.step_time_s < found.evaluate(plan).step_time_s


@pytest.mark.long
def test_what_a_plan_says_of_its_setting_stays(gpt):
    plan, cost = planned(
        gpt,
        load_cluster("4x5xA100"),
        60,
        microbatch_sizes=(1, 2),
        shardings=(Sharding(tensor=5),),
        zero=(1,),
        recompute=("full",),
        offload=(Offload(),),
    )
    found = replan(plan, lambda _: gpt, without_devices(cost, range(15, 20)), limits=Limits(max_plans=4)).best.plan
    assert (found.sharding, found.exchange.zero, found.recompute) == (plan.sharding, 1, plan.recompute)
    assert found.num_devices == 15


@pytest.mark.long
def test_the_same_twice(gpt):
    plan, cost = planned(gpt, load_cluster("8xA100"), 32, microbatch_sizes=(1, 2))
    left = without_devices(cost, (2,))
    first, second = (replan(plan, lambda _: gpt, left, limits=Limits(max_plans=4)) for _ in range(2))
    assert first == second


def test_a_plan_of_another_graph_is_refused(gpt):
    plan, cost = planned(gpt, load_cluster("8xA100"), 32, microbatch_sizes=(1,))
    with pytest.raises(PlanError, match="is for graph"):
        replan(plan, lambda _: weighted_graph([10**8] * 3), cost)
