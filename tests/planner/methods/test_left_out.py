"""Devices that plans leave out: which sets are tried; the rest is planned, estimated and simulated alone."""

from dataclasses import replace

import pytest

from meshwright.planner import Choices, Problem, Setting, whole_space
from meshwright.planner.left_out import MAX_SETS, idle_sets, unequal_settings
from meshwright.simulator import simulate_plan
from meshwright.spec import Cluster, Sharding, Workload, load_cluster
from meshwright.spec.scenario import Price, Scenario
from tests.graphs import chain_graph
from tests.planner.methods.test_unequal import mixed_cluster
from tests.planner.searching import solve

WORK = Workload(global_batch=32)


def slow_first(slowdown):
    """Two slow devices in a node before one of two fast ones."""
    mixed = mixed_cluster(slowdown=slowdown)
    return replace(mixed, nodes=mixed.nodes[::-1])


def problem_on(cluster, *, batch=32, **choices):
    graph = chain_graph(8, width=2048)
    choices.setdefault("idle", idle_sets(cluster, WORK))
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=replace(WORK, global_batch=batch),
        choices=Choices(microbatch_sizes=(4,), **choices),
    )


def test_of_equal_devices_none_are_left_out():
    assert idle_sets(load_cluster("2x4xA100"), WORK) == ((),)


def test_slow_kinds_are_left_out_wherever_they_stand():
    assert idle_sets(mixed_cluster(), WORK) == ((), (2, 3), (0, 1))
    assert idle_sets(slow_first(3.0), WORK) == ((), (0, 1), (2, 3))


def test_within_a_node_the_devices_of_a_kind_are_left_out():
    mixed = mixed_cluster()
    one = replace(mixed.nodes[0], devices=(*mixed.nodes[1].devices, *mixed.nodes[0].devices))
    assert idle_sets(replace(mixed, nodes=(one,)), WORK)[1] == (0, 1)


def test_speed_is_that_of_the_type_that_is_computed():
    mixed = mixed_cluster()
    fast, other = mixed.device_kinds
    kinds = fast, replace(other, slowdown=1.0, usual="", peak_flops_per_s={"float32": 1e15, "bfloat16": 1e12})
    both = replace(mixed, device_kinds=kinds)
    assert idle_sets(both, Workload(global_batch=32, precision="float32"))[1] == (0, 1)
    assert idle_sets(both, Workload(global_batch=32, precision="bfloat16"))[1] == (2, 3)


def test_nodes_that_differ_in_their_links_are_left_out():
    equal = load_cluster("2x2xA100")
    first, second = equal.nodes
    slower = replace(first, nic=replace(first.nic, bandwidth_bytes_per_s=1e9))
    assert idle_sets(replace(equal, nodes=(slower, second)), WORK)[:2] == ((), (0, 1))


def test_of_many_kinds_few_sets_are_tried():
    shipped = [load_cluster(f"2x{kind}") for kind in ("A100", "V100", "H100", "L40S", "H200", "B200")]
    cluster = Cluster(
        name="many",
        device_kinds=tuple(item.device_kinds[0] for item in shipped),
        nodes=tuple(replace(item.nodes[0], name=item.name) for item in shipped),
    )
    found = idle_sets(cluster, WORK)
    assert len(found) == MAX_SETS
    assert found[0] == ()
    assert all(len(idle) % 2 == 0 and idle == tuple(sorted(set(idle))) for idle in found)


def test_the_whole_space_leaves_devices_out_unless_their_number_is_given():
    graph, cluster = chain_graph(8, width=2048), mixed_cluster()
    assert whole_space(graph, cluster, WORK).idle == ((), (2, 3), (0, 1))
    assert whole_space(graph, cluster, WORK, num_devices=(3,)).idle == ((),)
    assert whole_space(graph, cluster, WORK, idle=((1,),)).idle == ((1,),)


@pytest.mark.parametrize("method", ["auto", "grid", "slicing"])
def test_devices_that_are_too_slow_are_left_out(method):
    cluster = slow_first(50.0)
    best = solve(problem_on(cluster), method).best
    assert best.plan.idle == (0, 1)
    assert best.plan.devices == (2, 3)
    # What it takes is what it takes where they are not there.
    alone = cluster.without((0, 1))
    own = solve(problem_on(alone, idle=((),)), method).best
    assert best.step_time_s == own.step_time_s
    assert best.reserved_bytes == own.reserved_bytes
    graph = chain_graph(8, width=2048)
    assert simulate_plan(best.plan, graph, cluster).step_time_s == best.step_time_s
    there = replace(best.plan, idle=())
    assert simulate_plan(there, graph, alone).step_time_s == best.step_time_s


def test_devices_that_help_are_used():
    best = solve(problem_on(mixed_cluster(slowdown=2.0))).best
    fast = solve(problem_on(mixed_cluster(slowdown=2.0), idle=((2, 3),))).best
    assert best.plan.idle == ()
    assert best.step_time_s < fast.step_time_s / 1.2


def test_stages_are_mapped_to_all_devices_though_uniform_plans_leave_some_out():
    # More settings than are looked at closely; the best uniform plan leaves the slow devices out.
    cluster = mixed_cluster(slowdown=3.0)
    problem = problem_on(cluster, batch=64, zero=(0, 1, 2, 3), recompute=("none", "full"))
    uniform, best = solve(problem, "grid").best, solve(problem).best
    assert uniform.plan.idle == (2, 3)
    assert best.plan.idle == ()
    assert best.step_time_s < uniform.step_time_s / 1.05


def test_settings_of_unequal_devices_use_all_of_them():
    choices = Choices(zero=(0, 1, 3), recompute=("none", "full"), shardings=(Sharding(), Sharding(tensor=2)))
    near = [Setting(2, Sharding(tensor=2), 3, "full", idle=(2, 3))]
    found = unequal_settings(near, choices)
    assert {(item.zero, item.recompute) for item in found} == {(0, "none"), (0, "full"), (1, "none"), (1, "full")}
    assert all(item.num_devices == 4 and not item.idle for item in found)
    assert {item.sharding for item in found} == set(choices.shardings)
    # What such mappings cannot share is left to the uniform plans that have it.
    assert near[0] not in found


def test_a_plan_that_leaves_out_other_devices_is_not_of_the_problem():
    problem = problem_on(mixed_cluster(slowdown=50.0))
    plan = solve(problem).best.plan
    assert problem.objection(plan) == ""
    assert "set of devices" in problem.objection(replace(plan, idle=(0, 3)))


def test_only_devices_that_are_used_are_paid_for():
    cluster = slow_first(50.0)
    prices = Scenario(effects=(Price(per_hour=2.0),))
    plans = solve(replace(problem_on(cluster), prices=prices))
    assert plans.best.plan.idle == (0, 1)
    assert plans.best.price.per_hour == pytest.approx(4.0)
