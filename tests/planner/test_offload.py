"""Searches for plans that keep something away from the devices: nothing that fits is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.memory import MemoryLimit
from meshwright.planner import NothingFitsError
from meshwright.spec import GradientExchange, Offload, Workload, load_cluster, load_shipped_graph
from tests.planner.searching import search_plans

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
    for item in found.ranked:
        again = search(offload, zero, num_ranks, memory=MemoryLimit(num_bytes=max(item.reserved_bytes)))
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
    with pytest.raises(NothingFitsError, match="none into that of the nodes") as raised:
        search(Offload(optimizer="host"), 1, 2, small)
    assert raised.value.nearest.excess_bytes < 0
    assert not raised.value.nearest.fits
