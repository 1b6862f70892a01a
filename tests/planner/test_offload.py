"""Searches for plans that keep something away from the devices: nothing that fits is left out."""

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner import Choices, NothingFitsError, Problem, evaluate_plan
from meshwright.planner.evaluate import share_of_hosts
from meshwright.spec import GradientExchange, Offload, Workload, load_cluster, load_shipped_graph
from tests.planner.searching import search_plans, solve

GPT = load_shipped_graph("gpt-tiny")
WORKLOAD = Workload(global_batch=8, precision="bfloat16")


def search(offload, zero, num_ranks, cluster=None, **options):
    return search_plans(
        lambda _: GPT,
        cluster or load_cluster("2xA100"),
        WORKLOAD,
        num_devices=num_ranks,
        microbatch_sizes=[1],
        exchange=GradientExchange(zero=zero),
        offload=(offload,),
        **options,
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        (0, Offload(optimizer="host")),
        (1, Offload(optimizer="host")),
        (3, Offload(optimizer="host")),
        (3, Offload(optimizer="host", parameters="host")),
        (0, Offload(activations="host")),
        (3, Offload(optimizer="host", parameters="host", activations="host")),
    ],
)
@pytest.mark.matrix
def test_what_fits_exactly_is_found(zero, offload, num_ranks):
    found = search(offload, zero, num_ranks)
    cluster = load_cluster("2xA100")
    cost = CostModel(cluster=cluster, precision=WORKLOAD.precision)
    for item in found.ranked:
        # Where there is little room, the allocators of all ranks are followed.
        tight = MemoryLimit(num_bytes=max(item.peak_memory_bytes))
        needed = max(evaluate_plan(item.plan, GPT, cluster, cost, memory=tight).reserved_bytes)
        again = search(offload, zero, num_ranks, memory=MemoryLimit(num_bytes=needed))
        assert again.best.step_time_s <= item.step_time_s
    if offload.optimizer == "device":
        # Of the few layers of a stage here those that come up take what others left.
        return
    least = min(max(item.reserved_bytes) for item in found.ranked)
    with pytest.raises(NothingFitsError):
        search(Offload(), 0, num_ranks, memory=MemoryLimit(num_bytes=least))


def test_hosts_without_room_leave_nothing():
    cluster = load_cluster("2xA100")
    small = replace(cluster, nodes=(replace(cluster.nodes[0], host_memory_bytes=2**20),))
    with pytest.raises(NothingFitsError, match="not into the nodes' host memory or drives") as raised:
        search(Offload(optimizer="host"), 1, 2, small)
    assert raised.value.nearest.excess_bytes < 0
    assert not raised.value.nearest.fits


OPTIMIZER_AWAY, MORE_AWAY = Offload(optimizer="host"), Offload(optimizer="host", activations="host")


@pytest.mark.parametrize("offload", [Offload(), OPTIMIZER_AWAY, MORE_AWAY])
def test_the_share_of_hosts_is_that_of_the_simulated_plan(offload):
    cluster = load_cluster("2xA100")
    cost = CostModel(cluster=cluster, precision=WORKLOAD.precision)
    item = search(offload, 1, 2).best
    share = max((node.share for node in item.nodes), default=0.0)
    assert share_of_hosts(item.plan, GPT, cluster, cost) == share
    assert (share > 0) == (offload != Offload())


def test_where_hosts_have_room_for_one_way_alone_it_is_found():
    """A way to offload that lacks room does not hide another one of the same layout."""
    cluster = load_cluster("2xA100")
    cost = CostModel(cluster=cluster, precision=WORKLOAD.precision)
    ways = MORE_AWAY, OPTIMIZER_AWAY
    plans = [search(away, 1, 2).best.plan for away in ways]
    much, little = (share_of_hosts(plan, GPT, cluster, cost) for plan in plans)
    assert much > little
    room = int(cluster.nodes[0].host_memory_bytes * (much + little) / 2)
    small = replace(cluster, nodes=(replace(cluster.nodes[0], host_memory_bytes=room),))
    problem = Problem(
        graph_for=lambda _: GPT,
        cluster=small,
        workload=WORKLOAD,
        cost=cost.on_machines(small),
        choices=Choices(zero=(1,), offload=ways, num_stages=(1,), microbatch_sizes=(plans[0].microbatch_size,)),
    )
    assert solve(problem, "grid").best.plan.offload == ways[1]
