"""Is another way of exchanging gradients worth it? The bound, the ways, the verdict."""

from dataclasses import replace

import pytest

from meshwright import Plan, Workload, load_cluster
from meshwright.planner import EXCHANGE_NAMES, compare_exchanges, cut_into_layers, follow_own_order
from meshwright.planner.exchange_search import PART_BYTES
from meshwright.simulator import schedule_exchange, simulate_plan
from meshwright.spec import GradientExchange, Optimizer, PlanError, StagePlan, load_shipped_graph
from tests.graphs import chain_graph, make_plan
from tests.simulator.exchanges import START_S, even_machines, layered_plan, simplified
from tests.simulator.plans import FixedCost, small_cluster


def data_parallel(model, cluster, batch):
    graph, count = load_shipped_graph(model), cluster.num_ranks
    return graph, Plan(
        model=model,
        graph_hash=graph.content_hash,
        cluster=cluster.name,
        workload=Workload(global_batch=batch * count, optimizer=Optimizer.named("sgd-momentum")),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=tuple(range(count))),),
        num_microbatches=count,
    )


@pytest.mark.long
def test_vgg_on_two_nodes_gains_from_priorities():
    cluster = load_cluster("2x8xV100")
    graph, plan = data_parallel("vgg16", cluster, 24)
    found = compare_exchanges(plan, graph, cluster)
    assert [item.name for item in found.others] == list(EXCHANGE_NAMES)
    assert found.is_worth_it
    assert found.best.name == "priorities"
    assert "Worth it: priorities" in found.explain()
    by_name = {row["exchange"]: row for row in found.rows()}
    assert by_name["as planned"]["gain_share"] == 0
    assert by_name["sharded"]["gain_share"] > 0.03
    # Every node's eight ranks push all they have through its cards: servers need sums inside the node first.
    assert by_name["servers"]["gain_share"] < -0.5
    assert min(row["step_time_s"] for row in by_name.values()) >= found.bound_s > 0.9 * found.best.step_time_s
    # What is recommended is a plan, and is what it says.
    again = simulate_plan(found.best.plan, graph, cluster)
    assert again.step_time_s == found.best.step_time_s


@pytest.mark.parametrize(
    "exchange",
    [
        GradientExchange(algorithm="ring"),
        GradientExchange(bucket_bytes=1),
        GradientExchange(zero=1),
        GradientExchange(algorithm="hierarchical", node_size=4),
    ],
)
def test_no_way_beats_the_bound_whatever_the_plan_does(exchange):
    cluster = load_cluster("2x4xV100")
    graph, plan = data_parallel("gpt-tiny", cluster, 2)
    found = compare_exchanges(replace(plan, exchange=exchange), graph, cluster)
    assert found.bound_s > 0
    for item in (found.own, *found.others):
        assert item.step_time_s >= found.bound_s
        if item.name != "servers":
            # Replicas have nothing else to wait for.
            (rank, *_) = item.simulation.ranks
            assert rank.exposed_exchange_s == pytest.approx(item.step_time_s - rank.busy_s, rel=1e-3)


def test_resnet_in_one_node_stays_as_it_is():
    cluster = load_cluster("8xV100")
    graph, plan = data_parallel("resnet50", cluster, 32)
    found = compare_exchanges(plan, graph, cluster)
    assert "hierarchical" not in [item.name for item in found.others]
    assert not found.is_worth_it
    assert found.gain < 0.03
    assert "Stay with the plan" in found.explain()
    assert "overlaps with the backward" in found.explain()


def test_the_reason_is_what_bounds_the_step():
    graph, plan, flops_per_s = simplified("gpt2-small")
    slow, even = (
        even_machines(2, rate / 2, latency_s=START_S / 2, flops_per_s=flops_per_s) for rate in (0.05e9, 12.5e9)
    )
    assert "fewer bytes or faster links" in compare_exchanges(plan, graph, slow, ("whole",)).explain()
    assert "ready last are needed first" in compare_exchanges(plan, graph, even, ("whole", "priorities")).explain()


def test_a_plan_of_one_stage_is_cut_into_its_layers():
    graph = chain_graph(5)
    plan = make_plan(graph, [(0, 5)], [2], 4)
    layered = cut_into_layers(plan, graph)
    assert layered.bounds == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    assert {stage.ranks for stage in layered.stages} == {(0, 1)}
    pipeline = make_plan(graph, [(0, 2), (2, 5)], [2, 2], 4)
    assert cut_into_layers(pipeline, graph) == pipeline
    cost = FixedCost(all_reduce=1e-6)
    steps = [simulate_plan(each, graph, small_cluster(), cost=cost).step_time_s for each in (plan, layered)]
    assert steps[0] == pytest.approx(steps[1])


def test_an_own_order_is_followed_and_checked():
    graph, cluster = chain_graph(3), small_cluster()
    plan = layered_plan(graph, 2, across_steps=True, bucket_bytes=1)
    cost = FixedCost(all_reduce=20e-6)
    seen = []

    def last_first(parts):
        seen.append(parts)
        return [part.index for part in reversed(parts)]

    ordered = schedule_exchange(plan, graph, cluster, cost=cost, own_order=last_first)
    assert ordered.exchange.sequence == (2, 1, 0)
    assert [part.stage for part in seen[0]] == [2, 1, 0]
    assert [part.ready_ps for part in seen[0]] == sorted(part.ready_ps for part in seen[0])
    for wrong in (lambda parts: [0, 0, 1], lambda parts: None, lambda parts: ["0", 1, 2, 3], lambda parts: []):
        with pytest.raises(PlanError, match="expected the `index` of each of its 3 parts once"):
            schedule_exchange(plan, graph, cluster, cost=cost, own_order=wrong)


def test_an_own_order_within_a_step_is_a_plan_that_runs():
    graph, cluster = load_shipped_graph("gpt-tiny"), load_cluster("2xA100")
    _, plan = data_parallel("gpt-tiny", cluster, 8)
    found = follow_own_order(plan, graph, cluster, lambda parts: [part.index for part in reversed(parts)])
    exchange = found.plan.exchange
    assert found.plan.is_runnable
    assert exchange.partition_bytes in PART_BYTES
    assert exchange.sequence == tuple(reversed(range(len(exchange.sequence))))
    assert found.step_time_s == simulate_plan(found.plan, graph, cluster).step_time_s
    assert f"{len(exchange.sequence)} part" in found.plan.describe()
    with pytest.raises(PlanError, match="zero = 1, which sums whole buckets"):
        follow_own_order(replace(plan, exchange=GradientExchange(zero=1)), graph, cluster, lambda parts: [])


def test_what_exchanges_nothing_is_refused():
    graph, cluster = chain_graph(2), small_cluster()
    alone = make_plan(graph, [(0, 2)], [1], 2)
    with pytest.raises(PlanError, match="exchanges no gradients"):
        compare_exchanges(alone, graph, cluster)
    plan = make_plan(graph, [(0, 1), (1, 2)], [1, 1], 2, schedule="pipedream")
    with pytest.raises(PlanError, match="is asynchronous"):
        compare_exchanges(plan, graph, cluster)
    shared = replace(make_plan(graph, [(0, 2)], [2], 2), exchange=GradientExchange(zero=3))
    with pytest.raises(PlanError, match="zero = 3, whose gradients are scattered during"):
        compare_exchanges(shared, graph, cluster)
    with pytest.raises(PlanError, match="did you mean 'servers'"):
        compare_exchanges(alone, graph, cluster, ("server",))
    assert replace(alone, exchange=GradientExchange()) == alone
