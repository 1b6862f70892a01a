"""What a cluster becomes in namespaces, links, queues and shares, without any of them."""

import pytest

from meshwright.emulation import Emulated
from meshwright.emulation.layout import plan_layout, rank_shares
from meshwright.spec import ClusterError, Link, ScenarioError
from meshwright.spec.cluster import NodePath, Racks
from meshwright.spec.scenario import Jitter, Oversubscription, Scenario, SlowDevice, SlowLink
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import Seconds
from tests.emulation.clusters import SHARED_NICS, SLOW_NODE, TWO_LABS, cluster_of

FILES = [f"/ns/{place}" for place in range(8)]


def test_ranks_of_a_nic_share_its_namespace():
    layout = plan_layout(SHARED_NICS)
    assert layout.nic_of_rank == (0, 0, 1, 1)
    assert [nic.address for nic in layout.nics] == ["10.77.0.1", "10.77.0.2"]
    # 62.5 MB/s of messages are 523 Mbit/s of frames.
    assert layout.nic_queues(0) == ["qdisc replace dev eth0 root tbf rate 522790055bit burst 125000 latency 100ms"]
    assert [line.split()[3] for line in layout.switch_queues()] == ["port0", "port1"]


def test_nics_of_a_node_are_joined_directly():
    layout = plan_layout(cluster_of((3, 2), (1, 1)))
    assert layout.nic_of_rank == (0, 0, 1, 2)
    first, second, third = (layout.nic_links(place, FILES) for place in range(3))
    assert "link add name nic1 type veth peer name nic0 netns /ns/1" in first
    assert "route add 10.77.0.2/32 dev nic1 src 10.77.0.1" in first
    assert "route add 10.77.0.1/32 dev nic0 src 10.77.0.2" in second
    assert not any("link add" in line for line in second + third)
    assert not any("nic" in line for line in third)


def test_more_nics_than_devices_are_left_out():
    assert plan_layout(cluster_of((2, 8), (1, 1))).nic_of_rank == (0, 1, 2)


def test_racks_have_a_bridge_and_one_uplink():
    layout = plan_layout(TWO_LABS)
    assert layout.num_racks == 2
    ports = [line for line in layout.switch_links(FILES[:4]) if line.startswith("link set port")]
    assert [line.split()[-2] for line in ports] == ["rack0", "rack0", "rack1", "rack1"]
    uplinks = [line for line in layout.switch_queues() if line.split()[3].startswith(("up", "down"))]
    assert [line.split()[3] for line in uplinks] == ["up0", "down0", "up1", "down1"]
    assert {line.split()[7] for line in uplinks} == {"104558011bit"}


def test_a_slow_path_is_a_class_at_both_ends():
    slow = NodePath(nodes=(0, 2), link=Link(latency_s=0, bandwidth_bytes_per_s=1e6))
    fast = NodePath(nodes=(0, 1), link=Link(latency_s=0, bandwidth_bytes_per_s=1e8))
    layout = plan_layout(cluster_of((1, 1), (1, 1), (1, 1), paths=(slow, fast)))
    first, second, third = (layout.nic_queues(place) for place in range(3))
    assert len(second) == 1
    assert first[-1].endswith("match ip dst 10.77.0.3/32 flowid 1:3")
    assert third[-1].endswith("match ip dst 10.77.0.1/32 flowid 1:3")
    assert "ceil 8364641bit" in first[-2]


def test_shares_fit_on_the_cores():
    assert rank_shares(SHARED_NICS, 2) == [0.45] * 4
    assert rank_shares(SLOW_NODE, 2) == [0.45, 0.45, 0.45, 0.225]
    assert rank_shares(SLOW_NODE, 64) == [1, 1, 1, 0.5]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            cluster_of((1, 1), (1, 1), nic=Link(latency_s=1e-2, bandwidth_bytes_per_s=1e7)),
            "node 'node0' has a latency of 10 ms",
        ),
        (cluster_of((1, 1), (1, 1), nic=Link(latency_s=0, bandwidth_bytes_per_s=1e10)), "80 Gbit/s; one machine emul"),
        (
            cluster_of(
                (2, 2), (1, 1), paths=(NodePath(nodes=(0, 1), link=Link(latency_s=0, bandwidth_bytes_per_s=1)),)
            ),
            "'node0' of cluster 'made' has several NICs and a slower path",
        ),
        (
            cluster_of(
                (1, 1),
                (1, 1),
                racks=Racks(nodes_per_rack=1, num_uplinks=2, uplink=Link(latency_s=0, bandwidth_bytes_per_s=1)),
            ),
            "racks with 2 uplinks; an emulated rack has one",
        ),
        (cluster_of(*[(1, 1)] * 251), "has 251 NICs in use; at most 250"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(cluster, message):
    with pytest.raises(ClusterError, match=message):
        plan_layout(cluster)


def test_shares_that_are_too_small_are_refused():
    with pytest.raises(ClusterError, match=r"200 devices; on the 2 cores here the slowest would have 0\.90% of a core"):
        rank_shares(cluster_of((200, 1)), 2)


def test_a_scenario_gives_states_at_its_moments():
    slow = SlowLink(links=Links("between racks"), factor=2.0, since=Seconds(60), until=Seconds(120))
    device = SlowDevice(devices=Devices("rank 1"), factor=3.0, since=Seconds(90))
    found = Emulated(cluster=TWO_LABS, devices=(0, 1, 2, 3), scenario=Scenario(effects=(slow, device))).states()
    assert [moment for moment, _ in found] == [0, 60, 90, 120]
    assert [cluster.racks.uplink.bandwidth_bytes_per_s for _, cluster in found] == [12.5e6, 6.25e6, 6.25e6, 12.5e6]
    assert [cluster.device_kind(1).slowdown for _, cluster in found] == [1, 1, 3, 3]


def test_what_cannot_be_emulated_is_refused():
    with pytest.raises(ScenarioError, match=r"effects\[0\]: an effect of kind 'jitter' cannot be emulated; expected"):
        Emulated(cluster=TWO_LABS, devices=(0,), scenario=Scenario(effects=(Jitter(spread=0.1),)))
    with pytest.raises(ClusterError, match="plan uses device 4, and the emulated cluster 'two labs' has 4 devices"):
        Emulated(cluster=TWO_LABS, devices=(0, 4))
    racks = Scenario(effects=(Oversubscription(nodes_per_rack=4, ratio=2.0),))
    with pytest.raises(ScenarioError, match="racks of 4 nodes were given"):
        Emulated(cluster=TWO_LABS, devices=(0,), scenario=racks)
