"""The method on unequal clusters: plans that use all devices, shares by speed, nothing on equal devices."""

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.planner import METHODS, Choices, Problem, SearchState
from meshwright.planner.methods.unequal.unequal_method import neighbours
from meshwright.planner.methods.unequal.virtual_workers import are_equal, find_devices, share_stage
from meshwright.simulator import simulate_plan
from meshwright.spec import Cluster, DeviceGroup, StagePlan, Workload, load_cluster
from tests.graphs import chain_graph
from tests.planner.searching import solve


def mixed_cluster(*, fast=2, slow=2, slowdown=3.0, memory=None):
    """One node of devices at their usual speed and one of devices that take ``slowdown`` times as long."""
    shipped = load_cluster("A100")
    usual = shipped.device_kinds[0]
    if memory is not None:
        # Without tensor cores: all of the memory may be used, to the byte.
        rates = {"float32": usual.peak_flops_per_s["float32"]}
        usual = replace(usual, peak_flops_per_s=rates)
    kinds = (
        usual,
        replace(usual, name="slow", slowdown=slowdown, usual=usual.name, memory_bytes=memory or usual.memory_bytes),
    )
    node = shipped.nodes[0]
    nodes = (
        replace(node, name="fast", devices=(DeviceGroup(kind=usual.name, count=fast),)),
        replace(node, name="slow", devices=(DeviceGroup(kind="slow", count=slow),)),
    )
    return Cluster(name="mixed", device_kinds=kinds, nodes=nodes)


def problem_on(cluster, *, layers=8, batch=32, width=2048, sizes=(4,), **choices):
    graph = chain_graph(layers, width=width)
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=batch),
        cost=CostModel(cluster=cluster, precision="float32"),
        choices=Choices(microbatch_sizes=sizes, **choices),
    )


def test_on_equal_devices_it_proposes_nothing():
    problem = problem_on(load_cluster("2x4xA100"))
    assert list(METHODS["unequal"](problem, SearchState())) == []
    assert all(are_equal(space) for space in problem.spaces())
    assert not any(are_equal(space) for space in problem_on(mixed_cluster()).spaces())


def test_a_faster_half_is_given_more():
    best = solve(problem_on(mixed_cluster()), "unequal").best
    assert sorted(rank for stage in best.plan.stages for rank in stage.ranks) == [0, 1, 2, 3]
    layers = {rank: stage.stop - stage.start for stage in best.plan.stages for rank in stage.ranks}
    shares = {
        rank: count
        for stage in best.plan.stages
        for rank, count in zip(stage.ranks, stage.counts(best.plan.num_microbatches), strict=True)
    }
    work = {rank: layers[rank] * shares[rank] for rank in range(4)}
    assert min(work[0], work[1]) > max(work[2], work[3])
    sliced = solve(problem_on(mixed_cluster()), "slicing").best
    assert best.step_time_s <= sliced.step_time_s
    assert best.fits


def test_replicas_of_one_stage_share_by_speed():
    problem = problem_on(mixed_cluster(slowdown=3.0), batch=64)
    (space,) = problem.spaces()
    assert share_stage(space, 4, (0, 8), (0, 1, 2, 3)) == (6, 6, 2, 2)
    assert share_stage(space, 4, (0, 8), (0, 1)) == ()
    # The loop of one layer has so small a share of overhead that shares take 4 rounds less of the slow ones.
    stages = (StagePlan(start=0, stop=8, ranks=(0, 1, 2, 3)),)
    plan = replace(solve(problem, "unequal").best.plan, stages=stages, schedule="1f1b")
    shared = replace(plan, stages=(replace(stages[0], shares=(6, 6, 2, 2)),))
    graph = problem.graph_for(4)
    seconds = [
        simulate_plan(item, graph, problem.cluster, cost=problem.cost).ranks[3].forward_s for item in (plan, shared)
    ]
    assert seconds[1] == pytest.approx(seconds[0] / 2)


def test_a_device_with_little_memory_gets_what_fits():
    # Parameters, gradients and both states of a layer take 4 · 2048² · 4 bytes: 64 MiB; the slow ones hold two of 8.
    problem = problem_on(mixed_cluster(slowdown=1.0, memory=200 * 2**20))
    best = solve(problem, "unequal").best
    assert best.fits
    layers = {rank: stage.stop - stage.start for stage in best.plan.stages for rank in stage.ranks}
    assert max(layers[2], layers[3]) <= 2


def test_neighbours_are_plans_of_all_devices():
    problem = problem_on(mixed_cluster())
    (space,) = problem.spaces()
    plan = solve(problem, "unequal").best.plan
    found = list(neighbours(space, plan))
    assert found
    for other in found:
        assert other != plan
        assert {rank for stage in other.stages for rank in stage.ranks} == {0, 1, 2, 3}
        assert other.stages[0].start == 0
        assert other.stages[-1].stop == 8


def test_nodes_that_are_alike_are_merged_where_states_are_many():
    cluster = mixed_cluster(fast=4, slow=4)
    names = iter(range(100))
    nodes = tuple(replace(node, name=f"n{next(names)}") for node in cluster.nodes * 4)
    (space,) = problem_on(replace(cluster, nodes=nodes), batch=256).spaces()
    devices = find_devices(space)
    assert [item.size for item in devices.classes] == [16, 16]
    ranks = devices.ranks(range(len(devices.groups)))[0]
    assert ranks == (0,)


def test_the_same_seed_gives_the_same_plans():
    first, second = (solve(problem_on(mixed_cluster()), "unequal", seed=3) for _ in range(2))
    assert [item.plan for item in first.ranked] == [item.plan for item in second.ranked]
