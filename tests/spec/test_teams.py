"""Clusters of teams: as slow as their slowest device, and on NICs that their messages share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import Cluster, ClusterError, DeviceGroup, load_cluster
from meshwright.spec.teams import team_cluster


def test_teams_of_one_are_the_cluster_itself():
    cluster = load_cluster("2x8xA100")
    assert team_cluster(cluster, 1) is cluster


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_all_teams_together_send_as_fast_as_all_devices(num_devices, width, num_nics, num_nodes):
    cluster = load_cluster(f"{num_nodes}x{num_devices}xA100")
    cluster = replace(cluster, nodes=tuple(replace(node, num_nics=num_nics) for node in cluster.nodes))
    if num_devices % width and (width % num_devices or num_nodes % (width // num_devices)):
        with pytest.raises(ClusterError, match=f"Teams of {width}"):
            team_cluster(cluster, width)
        return
    if width > num_devices * num_nodes:
        return
    teams = team_cluster(cluster, width)
    assert teams.num_ranks * width == cluster.num_ranks
    node, seen = cluster.nodes[0], teams.nodes[0]
    # Every device sends one byte out of its node: k NICs carry d bytes; seen as teams, each NIC carries its teams'.
    by_devices = -(-num_devices // num_nics) / node.nic.bandwidth_bytes_per_s
    per_nic = -(-seen.num_devices // seen.num_nics)
    messages = min(width, num_devices)
    by_teams = per_nic / seen.nic.bandwidth_bytes_per_s
    assert by_teams * (messages if width > num_devices else 1) >= by_devices * 0.999 or num_nics >= num_devices
    if width <= num_devices:
        assert by_teams == pytest.approx(by_devices)


def test_a_team_is_as_slow_as_its_slowest_device_and_has_the_least_memory():
    kinds = tuple(load_cluster(name).device_kinds[0] for name in ("A100", "H100"))
    small = replace(kinds[1], memory_bytes=kinds[0].memory_bytes // 2)
    devices = (DeviceGroup(kind="A100", count=1), DeviceGroup(kind="H100", count=3))
    node = replace(load_cluster("4xA100").nodes[0], devices=devices)
    mixed = Cluster(name="mixed", device_kinds=(kinds[0], small), nodes=(node,))
    first, second = (team_cluster(mixed, 2).device_kind(rank) for rank in range(2))
    assert first.peak_flops_per_s == kinds[0].peak_flops_per_s
    assert first.memory_bytes == small.memory_bytes
    assert second == small


def test_teams_cover_whole_nodes_or_lie_within_one():
    assert team_cluster(load_cluster("4x8xA100"), 16).nodes[1].name == "node2 to node3"
    for width in (3, 12, 32, 64):
        with pytest.raises(ClusterError, match="divide a node, or cover whole nodes"):
            team_cluster(load_cluster("3x8xA100"), width)
