"""Inference under a latency: what a microbatch takes alone, and which are not looked at because they take too long."""

from dataclasses import replace
from itertools import product

import pytest

from meshwright.cost import CostModel
from meshwright.planner import Problem
from meshwright.planner.evaluate import predict_latency, predict_makespan
from meshwright.planner.ranking import LEAST_DIFFERENCE
from meshwright.spec import Plan, PlanError, StagePlan, Workload
from tests.planner.searching import search_plans
from tests.planner.test_search import cluster_of, search, weighted_graph

GRAPH = weighted_graph([10**8] * 4, mode="inference")


def plan_of(*ranks, size=2, batch=16):
    cuts = [4 * place // len(ranks) for place in range(len(ranks) + 1)]
    return Plan(
        model="",
        graph_hash=GRAPH.content_hash,
        cluster="",
        workload=Workload(kind="inference", global_batch=batch),
        stages=tuple(StagePlan(start=a, stop=b, ranks=r) for a, b, r in zip(cuts, cuts[1:], ranks, strict=False)),
        num_microbatches=batch // size,
        schedule="gpipe",
    )


def latency_of(plan, cluster):
    return predict_latency(plan, GRAPH, cluster, CostModel(cluster=cluster, precision="float32"))


def test_throughput_under_a_latency():
    """Larger microbatches have more throughput and take longer; the limit decides, and says so where none is left."""
    graph = weighted_graph([10**8] * 4, mode="inference")
    cluster = cluster_of(4)
    free = search(graph, cluster, 64)
    slow = search(graph, cluster, 64, max_latency_s=1.0).best
    assert slow.step_time_s == free.best.step_time_s
    assert slow.latency_s is not None
    tight = search(graph, cluster, 64, max_latency_s=slow.latency_s / 3, max_plans=4).best
    assert tight.latency_s <= slow.latency_s / 3
    assert tight.step_time_s >= slow.step_time_s
    with pytest.raises(PlanError, match=r"takes .* split ops over devices .*, or allow a longer"):
        search(graph, cluster, 64, max_latency_s=1e-9)
    with pytest.raises(PlanError, match=r"given for training; expected .* inference"):
        search(weighted_graph([10**8] * 4), cluster, 64, max_latency_s=1.0)


def test_the_latency_is_that_of_a_batch_alone():
    """On one device the step of one batch; through two stages longer than either of them takes."""
    graph = weighted_graph([10**8] * 4, mode="inference")
    one = search(graph, cluster_of(1), 8, microbatch_sizes=(2,), max_latency_s=1.0).best
    assert one.latency_s == pytest.approx(search(graph, cluster_of(1), 2, microbatch_sizes=(2,)).best.step_time_s)
    two = search(graph, cluster_of(2), 8, microbatch_sizes=(2,), num_stages=2, max_latency_s=1.0).best
    assert one.latency_s < two.latency_s < 1.2 * one.latency_s
    assert two.step_time_s < one.step_time_s


def test_replicas_of_stages_wait_for_nobody():
    """Two replicas of each of two stages answer as one of each does, wherever they lie."""
    one = latency_of(plan_of((0,), (1,)), cluster_of(2))
    assert latency_of(plan_of((0, 1), (2, 3)), cluster_of(4)) == one
    assert latency_of(plan_of((0, 2, 4), (1, 3, 5), batch=12), cluster_of(6)) == one
    # A microbatch goes from the one replica to either of two.
    assert latency_of(plan_of((0,), (1, 2)), cluster_of(3)) == one


def test_the_slowest_replicas_count():
    cluster = cluster_of(4)
    fast = cluster.device_kind(0)
    slow = replace(fast, name="slow", peak_flops_per_s={k: v / 3 for k, v in fast.peak_flops_per_s.items()})
    node = cluster.nodes[0]
    half = replace(node.devices[0], count=2)
    mixed = replace(
        cluster,
        device_kinds=(fast, slow),
        nodes=(replace(node, devices=(half, replace(half, kind="slow"))),),
    )
    even = latency_of(plan_of((0, 1, 2, 3)), cluster)
    assert latency_of(plan_of((0, 1, 2, 3)), mixed) > 2 * even
    assert latency_of(plan_of((0, 1), (2, 3)), mixed) > latency_of(plan_of((0, 1), (2, 3)), cluster)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0, 1.5])
def test_no_microbatch_is_left_out_that_is_quick_enough(share):
    cluster = cluster_of(1)
    latencies = {size: latency_of(plan_of((0,), size=size), cluster) for size in (1, 2, 4, 8, 16)}
    limit = latencies[4] * share
    problem = Problem(
        graph_for=lambda size: GRAPH,
        cluster=cluster,
        workload=Workload(kind="inference", global_batch=16),
        cost=CostModel(cluster=cluster, precision="float32"),
        max_latency_s=limit,
    )
    (space,) = problem.spaces()
    assert set(space.microbatch_sizes) == {size for size, seconds in latencies.items() if seconds <= limit * (1 + 1e-9)}


def test_unlike_numbers_of_unlike_replicas():
    """Microbatch 4 goes through the slow replica of both stages, though neither first chain does."""
    cluster = cluster_of(5)
    fast, node = cluster.device_kind(0), cluster.nodes[0]
    slow = replace(fast, name="slow", peak_flops_per_s={k: v / 3 for k, v in fast.peak_flops_per_s.items()})
    one = replace(node.devices[0], count=1)
    kinds = (one, replace(one, kind="slow"), replace(one, kind="slow"), one, one)
    mixed = replace(cluster, device_kinds=(fast, slow), nodes=(replace(node, devices=kinds),))
    whole = latency_of(plan_of((0, 1), (2, 3, 4), size=1, batch=12), mixed)
    assert whole > 2.5 * latency_of(plan_of((0,), (1,)), cluster_of(2)) / 2
    all_slow = replace(
        cluster_of(2), device_kinds=(slow,), nodes=(replace(node, devices=(replace(one, kind="slow", count=2),)),)
    )
    assert whole == latency_of(plan_of((0,), (1,), size=1), all_slow)


@pytest.mark.parametrize("batch", [1, 6, 8])
def test_the_least_latency_is_that_of_all_uniform_pipelines(batch):
    cluster = cluster_of(4)
    workload = Workload(kind="inference", global_batch=batch)
    plans = search_plans(lambda size: GRAPH, cluster, workload, aim="latency", max_plans=50)
    cost = CostModel(cluster=cluster, precision="float32")
    found = []
    for num_stages, replicas, size in product((1, 2, 4), (1, 2, 3, 4), range(1, batch + 1)):
        if num_stages * replicas <= 4 and batch % size == 0 and replicas <= batch // size:
            ranks = [tuple(range(place * replicas, (place + 1) * replicas)) for place in range(num_stages)]
            plan = plan_of(*ranks, size=size, batch=batch)
            found.append(predict_makespan(plan, GRAPH, cluster, cost))
    times = [item.makespan_s for item in plans.ranked]
    assert min(times) == pytest.approx(min(found), rel=1e-9)
    assert times[0] <= (1 + LEAST_DIFFERENCE) * min(times)
    slower = [time for time in times if time > (1 + LEAST_DIFFERENCE) * min(times)]
    assert slower == sorted(slower)
    assert plans.gap is None
    assert "is answered in" in plans.explain()
    with pytest.raises(PlanError, match="expected inference"):
        search_plans(lambda size: GRAPH, cluster, Workload(global_batch=batch), aim="latency")


def test_without_any_it_says_what_the_least_is():
    least = latency_of(plan_of((0,), size=1), cluster_of(1))
    with pytest.raises(PlanError, match=r"a microbatch of 1 sample takes at least .* to compute"):
        search(GRAPH, cluster_of(4), 16, max_latency_s=least / 2)
    cluster = cluster_of(4)
    with pytest.raises(PlanError, match=r"The fastest of \d+ plans? that"):
        search_plans(
            lambda size: GRAPH,
            cluster,
            Workload(kind="inference", global_batch=16),
            num_stages=4,
            max_latency_s=least * (1 + 1e-5),
        )
