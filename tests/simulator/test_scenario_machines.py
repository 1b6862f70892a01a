"""Scenarios that change machines: exactly what they name, in their order, and costs follow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.simulator import simulate_plan
from meshwright.simulator.routes import Routes
from meshwright.simulator.scenarios import apply_scenario, change_machines
from meshwright.spec import (
    Measurements,
    Optimizer,
    OptimizerMeasurement,
    Plan,
    ScenarioError,
    StagePlan,
    TransferMeasurement,
    Workload,
)
from meshwright.spec.scenario import (
    DeviceMemory,
    Jitter,
    NetworkCards,
    OtherDevice,
    Oversubscription,
    Scenario,
    SlowDevice,
    SlowLink,
    compose,
)
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import Bytes, BytesPerSecond, Seconds
from tests.graphs import chain_graph
from tests.simulator.plans import fast_cluster, small_cluster
from tests.simulator.test_routes import links_of

GRAPH = chain_graph(6, width=32)


def scenario(*effects, seed=None):
    return Scenario(effects=effects, seed=seed)


def slow(devices, factor, **times):
    return SlowDevice(devices=Devices(devices), factor=factor, **times)


def plan_on(num_stages, replicas, *, schedule="1f1b", microbatches=4, batch=8):
    cuts = [6 * stage // num_stages for stage in range(num_stages + 1)]
    return Plan(
        model="chain",
        graph_hash=GRAPH.content_hash,
        cluster="test",
        workload=Workload(global_batch=batch, optimizer=Optimizer(kind="sgd")),
        stages=tuple(
            StagePlan(
                start=cuts[stage], stop=cuts[stage + 1], ranks=tuple(range(stage * replicas, (stage + 1) * replicas))
            )
            for stage in range(num_stages)
        ),
        num_microbatches=microbatches,
        schedule=schedule,
    )


@given(
    st.sampled_from([(1, 4), (2, 2), (4, 1)]),
    st.sampled_from(["gpipe", "1f1b"]),
    st.sampled_from(["queued", "fair"]),
    st.sampled_from([(), (Jitter(),), (slow("all", 2.0, since=Seconds(5)),)]),
)
def test_a_scenario_without_effects_on_machines_changes_nothing_to_the_picosecond(shape, schedule, contention, effects):
    cost = CostModel(cluster=fast_cluster("2x2xA100"))
    same = apply_scenario(cost, scenario(*effects))
    assert same is cost
    plan = plan_on(*shape, schedule=schedule)
    before = simulate_plan(plan, GRAPH, cost.cluster, cost=cost, contention=contention)
    # The same costs by the way of a changed cluster whose changes take each other back.
    back = scenario(slow("all", 4.0), SlowLink(links=Links("between nodes"), factor=2.0))
    forth = scenario(slow("all", 0.25), SlowLink(links=Links("between nodes"), factor=0.5))
    there_and_back = apply_scenario(cost, compose([back, forth]))
    after = simulate_plan(plan, GRAPH, there_and_back.cluster, cost=there_and_back, contention=contention)
    assert after.timeline == before.timeline


@given(st.floats(0.25, 8), st.integers(0, 3), st.sampled_from(["cpu", "A100", "V100"]))
def test_a_slow_device_makes_everything_it_computes_longer_by_its_factor(factor, rank, kind):
    cost = CostModel(cluster=fast_cluster(f"4x{kind}"))
    slowed = apply_scenario(cost, scenario(slow(f"rank {rank}", factor)))
    plan = plan_on(4, 1, microbatches=1)
    before = simulate_plan(plan, GRAPH, cost.cluster, cost=cost).ranks
    after = simulate_plan(plan, GRAPH, slowed.cluster, cost=slowed).ranks
    for other in range(4):
        expected = before[other].busy_s * (factor if other == rank else 1)
        assert after[other].busy_s == pytest.approx(expected, rel=1e-5)


@given(st.floats(1, 10))
def test_under_data_parallelism_all_wait_for_the_slowest(factor):
    """Without the time of links, a step of equal replicas is as slow as the slowest of them."""
    instant = SlowLink(links=Links("inside nodes"), bandwidth=BytesPerSecond(1e18), latency=Seconds(0))
    cost = apply_scenario(CostModel(cluster=small_cluster(devices=4)), scenario(instant))
    one_slow = apply_scenario(cost, scenario(slow("rank 2", factor)))
    plan = plan_on(1, 4)
    before = simulate_plan(plan, GRAPH, cost.cluster, cost=cost).step_time_s
    assert simulate_plan(plan, GRAPH, one_slow.cluster, cost=one_slow).step_time_s == pytest.approx(
        factor * before, rel=1e-6
    )


def test_effects_apply_in_their_order():
    cluster = fast_cluster("2x2xA100")
    factor, bandwidth = (
        SlowLink(links=Links("between nodes"), factor=2.0),
        SlowLink(links=Links("between nodes"), bandwidth=BytesPerSecond(10e9)),
    )
    of = lambda *effects: change_machines(cluster, scenario(*effects))[0].nodes[0].nic.bandwidth_bytes_per_s
    assert of(factor, bandwidth) == 10e9
    assert of(bandwidth, factor) == 5e9
    assert of(factor, factor) == cluster.nodes[0].nic.bandwidth_bytes_per_s / 4
    both = compose([scenario(factor, seed=3), scenario(bandwidth), Scenario(name="x", seed=5)])
    assert both == Scenario(name="x", seed=5, effects=(factor, bandwidth))


def test_slow_factors_multiply_and_other_kinds_keep_them():
    cluster = fast_cluster("2x2xA100")
    changed, usual = change_machines(
        cluster,
        scenario(slow("node 1", 2.0), slow("ranks 2-3", 1.5), OtherDevice(devices=Devices("rank 3"), device="V100")),
    )
    kinds = [changed.device_kind(rank) for rank in range(4)]
    assert [kind.slowdown for kind in kinds] == [1, 1, 3, 3]
    assert [kind.usual_name for kind in kinds] == ["A100", "A100", "A100", "V100"]
    assert [usual.device_kind(rank).name for rank in range(4)] == ["A100", "A100", "A100", "V100"]
    assert changed.device_kind(3).at_usual_speed() == fast_cluster("V100").device_kind(0)


def test_memory_is_what_was_asked_for_and_costs_stay():
    cluster = fast_cluster("4xA100")
    cost = CostModel(cluster=cluster)
    less = apply_scenario(cost, scenario(DeviceMemory(devices=Devices("rank 1"), memory=Bytes(2**30))))
    assert [less.cluster.device_kind(rank).memory_bytes for rank in range(4)] == [
        cluster.device_kind(0).memory_bytes if rank != 1 else 2**30 for rank in range(4)
    ]
    plan = plan_on(2, 2)
    before, after = (simulate_plan(plan, GRAPH, each.cluster, cost=each) for each in (cost, less))
    assert (before.timeline, before.step_time_s) == (after.timeline, after.step_time_s)


def test_what_was_measured_holds_for_slow_devices_and_links_by_their_factor():
    """A table of the kind's own name costs the slow device, too, and measured links are scaled."""
    seconds = {size: 1e-5 + size / 1e8 for size in (10_000, 1_000_000, 100_000_000)}
    transfers = tuple(
        TransferMeasurement(kind="all_reduce", num_ranks=2, num_bytes=size, seconds=each)
        for size, each in seconds.items()
    )
    optimizers = tuple(
        OptimizerMeasurement(kind="sgd", dtype="float32", num_elements=count, num_tensors=4, seconds=count * 1e-8)
        for count in (100, 10_000, 1_000_000)
    )
    table = Measurements(device="cpu", software="", date="", transfers=transfers, optimizers=optimizers)
    cost = CostModel(cluster=fast_cluster("2xcpu"), measurements=table)
    slower = apply_scenario(cost, scenario(SlowLink(links=Links("inside nodes"), factor=4.0), slow("rank 1", 3.0)))
    for size, measured in seconds.items():
        assert cost.collective_seconds("all_reduce", (0, 1), size) == pytest.approx(measured, rel=0.05)
        assert slower.collective_seconds("all_reduce", (0, 1), size) > 1.2 * measured
    assert slower.collective_seconds("all_reduce", (0, 1), 1e8) == pytest.approx(4 * seconds[100_000_000], rel=0.05)
    usual, late = (slower.cluster.device_kind(rank) for rank in range(2))
    optimizer, parameters = Optimizer(kind="sgd"), range(len(GRAPH.tensors))
    step = lambda kind: slower.estimate_optimizer(GRAPH, parameters, optimizer, kind)
    assert step(usual).basis == step(late).basis == "transferred"
    assert step(late).seconds == 3 * step(usual).seconds


def test_nodes_may_talk_faster_than_the_devices_of_one():
    cost = CostModel(cluster=fast_cluster("2x2xV100"))
    fast = apply_scenario(
        cost,
        scenario(
            SlowLink(links=Links("inside nodes"), bandwidth=BytesPerSecond(1e9)),
            SlowLink(links=Links("between nodes"), bandwidth=BytesPerSecond(100e9)),
        ),
    )
    inside, across = (fast.collective_seconds("send", pair, 1e8) for pair in ((0, 1), (1, 2)))
    assert across < inside / 20
    assert cost.collective_seconds("send", (0, 1), 1e8) < cost.collective_seconds("send", (1, 2), 1e8)
    # A ring over both is bound by the slow links inside.
    assert fast.collective_seconds("all_reduce", range(4), 1e8) >= 0.99 * fast.collective_seconds(
        "all_reduce", (0, 1), 1e8
    )


def test_a_slow_path_between_two_nodes_is_felt_by_who_uses_it():
    cost = CostModel(cluster=fast_cluster("3x2xA100"))
    path = SlowLink(links=Links("between node 0 and node node2"), factor=5.0)
    slower = apply_scenario(cost, scenario(path))
    ratio = lambda ranks: slower.collective_seconds("send", ranks, 1e9) / cost.collective_seconds("send", ranks, 1e9)
    assert ratio((0, 4)) == pytest.approx(5, rel=1e-3)
    assert ratio((5, 1)) == pytest.approx(5, rel=1e-3)
    assert ratio((0, 2)) == ratio((2, 4)) == ratio((0, 1)) == 1
    assert slower.cluster.link_between(0, 4).bandwidth_bytes_per_s == pytest.approx(5e9)
    twice = apply_scenario(slower, scenario(path))
    assert twice.cluster.link_between(0, 4).bandwidth_bytes_per_s == pytest.approx(1e9)


@pytest.mark.parametrize(("ratio", "num_uplinks", "share"), [(1, 4, 1.0), (2, 2, 1.0), (3, 1, 4 / 3), (8, 1, 0.5)])
def test_oversubscribed_uplinks_carry_the_bandwidth_of_the_nics_divided(ratio, num_uplinks, share):
    cluster = fast_cluster("4x2xV100")
    cluster = replace(cluster, nodes=tuple(replace(node, num_nics=2) for node in cluster.nodes))
    changed = change_machines(cluster, scenario(Oversubscription(nodes_per_rack=2, ratio=ratio)))[0]
    nic = cluster.nodes[0].nic.bandwidth_bytes_per_s
    assert changed.racks.num_uplinks == num_uplinks
    assert changed.racks.uplink.bandwidth_bytes_per_s == pytest.approx(share * nic)
    assert changed.link_between(0, 7).bandwidth_bytes_per_s == pytest.approx(min(share, 1) * nic)
    assert changed.link_between(0, 2) == cluster.link_between(0, 2)


def test_routes_between_racks_share_uplinks_and_others_do_not():
    cluster = small_cluster(num_nodes=4, devices=2, num_nics=2)
    changed = change_machines(cluster, scenario(Oversubscription(nodes_per_rack=2, ratio=2)))[0]
    routes = Routes(changed)
    send = lambda a, b: links_of(routes, routes.send(a, b))
    assert len(send(0, 2)) == 2  # nodes 0 and 1 are one rack
    assert len(send(0, 4)) == 4
    # NICs 0 and 1 of a rack share its first uplink, 2 and 3 the second.
    assert len(send(0, 4) & send(1, 5)) == 2
    assert not send(0, 4) & send(2, 6)
    names = routes.names()
    assert {name for name in names if "uplink" in name} >= {"uplink 0 of rack 0, out", "uplink 1 of rack 1, in"}
    assert len(set(names)) == len(names)


def test_transfers_wait_for_each_other_at_an_oversubscribed_uplink():
    """Four pipelines of two stages, a rack for each stage: at 4:1 one uplink carries what four NICs brought."""
    cluster = small_cluster(num_nodes=8, devices=1)
    cost = CostModel(cluster=cluster)
    over = apply_scenario(cost, scenario(Oversubscription(nodes_per_rack=4, ratio=4)))
    plan = plan_on(2, 4, microbatches=4)
    usual, result = (simulate_plan(plan, GRAPH, c.cluster, cost=c) for c in (cost, over))
    sends = lambda result: sorted(result.timeline.start_ps[result.timeline.opcode == 6].tolist())
    assert result.step_time_s > usual.step_time_s
    assert sends(result) != sends(usual)


def test_all_to_all_between_racks_is_bound_by_the_uplinks():
    cluster = small_cluster(num_nodes=8, devices=1)
    cost = CostModel(cluster=cluster)
    seconds = lambda ratio, op: apply_scenario(
        cost, scenario(Oversubscription(nodes_per_rack=4, ratio=ratio))
    ).collective_seconds(op, range(8), 8e8)
    assert seconds(1, "all_reduce") == pytest.approx(cost.collective_seconds("all_reduce", range(8), 8e8))
    # Of 4 nodes 7/8 of their bytes leave each, and (4/8)·4 nodes' worth leave the rack: 16/7 of a NIC's.
    own, over = cost.collective_seconds("all_to_all", range(8), 8e8), seconds(4, "all_to_all")
    assert over / own == pytest.approx(16 / 7, rel=1e-3)


def test_network_cards_are_shared():
    changed = change_machines(fast_cluster("2x8xA100"), scenario(NetworkCards(num_nics=2)))[0]
    assert changed.columns().nic.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 2


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (slow("rank 4", 2.0), "'rank 4' was selected, but cluster '2x2xA100' has ranks 0 to 3"),
        (slow("node 2", 2.0), "'node 2' was selected, but cluster '2x2xA100' has nodes 0 to 1"),
        (slow("kind H100", 2.0), "has no such device"),
        (slow("5 at random", 2.0), "has 4 devices"),
        (slow("rank 9", 2.0, since=Seconds(5)), "ranks 0 to 3"),
        (OtherDevice(devices=Devices("all"), device="H10"), "no device kind 'H10' is shipped .did you mean 'H100'"),
        (SlowLink(links=Links("between racks"), factor=2.0), "has no racks"),
        (SlowLink(links=Links("between node 1 and node 1"), factor=2.0), "only between two different nodes"),
        (SlowLink(links=Links("of node 7"), factor=2.0), "nodes 0 to 1"),
        (Oversubscription(nodes_per_rack=2, ratio=2.0), "there is only one rack"),
    ],
)
def test_what_the_cluster_has_not_is_refused(effect, words):
    field = {"other-device": "device", "slow-link": "links", "oversubscription": "nodes_per_rack"}
    with pytest.raises(ScenarioError, match=words) as caught:
        change_machines(fast_cluster("2x2xA100"), scenario(Jitter(), effect))
    assert str(caught.value).startswith(f"effects[1] ({effect.KIND}).{field.get(effect.KIND, 'devices')}: ")


def test_links_between_nodes_of_one_node_are_refused():
    with pytest.raises(ScenarioError, match="has one node"):
        change_machines(fast_cluster("4xA100"), scenario(SlowLink(links=Links("between nodes"), factor=2.0)))


def test_a_slow_time_is_a_time():
    cluster = fast_cluster("2xA100")
    effect = slow("rank 1", 2.0, since=Seconds(10), until=Seconds(20))
    factors = [change_machines(cluster, scenario(effect), at)[0].device_kind(1).slowdown for at in (0, 10, 19.9, 20)]
    assert factors == [1, 2, 2, 1]


def test_a_slow_link_has_a_time_too():
    cluster = fast_cluster("2x2xA100")
    usual = cluster.nodes[0].nic.bandwidth_bytes_per_s
    effect = SlowLink(links=Links("of node 1"), factor=4.0, since=Seconds(10), until=Seconds(20))
    changed = [change_machines(cluster, scenario(effect), at)[0] for at in (0, 10, 19.9, 20)]
    assert [found.nodes[1].nic.bandwidth_bytes_per_s / usual for found in changed] == [1, 0.25, 0.25, 1]
    assert scenario(effect).moments() == [0, 10, 20]


def test_random_choices_follow_from_the_seed_and_place():
    cluster = fast_cluster("8xA100")
    chosen = lambda seed: np.flatnonzero(
        [
            change_machines(cluster, scenario(slow("3 at random", 2.0), seed=seed))[0].device_kind(rank).slowdown > 1
            for rank in range(8)
        ]
    ).tolist()
    assert all(len(chosen(seed)) == 3 for seed in range(4))
    assert chosen(1) == chosen(1)
    assert len({tuple(chosen(seed)) for seed in range(8)}) > 2
