"""Clusters: the short form, shipped hardware, links between ranks, and what is refused."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import (
    Cluster,
    ClusterError,
    DeviceGroup,
    DeviceKind,
    DocumentError,
    Link,
    load_cluster,
    shipped_kinds,
    write_document,
)
from meshwright.spec.cluster import NodePath, Racks
from tests.spec.examples import CLUSTER
from tests.strategies import clusters

every_kind = pytest.mark.parametrize("kind", shipped_kinds())


def test_what_is_shipped():
    kinds = "A100 A10G A6000 B200 H100 H200 L4 L40S MI300X RTX3090 RTX4090 RTX5090 T4 V100 cpu"
    assert shipped_kinds() == tuple(kinds.split())


@every_kind
def test_a_shipped_node_is_complete(kind):
    cluster = load_cluster(kind)
    (device,), (node,) = cluster.device_kinds, cluster.nodes
    assert device.name == kind
    assert cluster.num_ranks == 1
    # each figure has a source with a year, dense rates do not fall with the width of the numbers
    assert re.search(r"\b20\d\d\b", device.source)
    assert re.search(r"\b20\d\d\b", node.source)
    rates = device.peak_flops_per_s
    assert rates["float32"] >= rates.get("float64", 0)
    assert min(rates.get("bfloat16", rates["float32"]), rates.get("float16", rates["float32"])) >= rates["float32"]
    assert rates.get("float8_e4m3fn", 1e99) >= rates.get("bfloat16", 0)
    # memory is faster than any way out of the device, and the host holds more than a device
    assert device.memory_bandwidth_bytes_per_s > max(
        link.bandwidth_bytes_per_s for link in (node.device_link, node.pcie, node.nic)
    )
    assert node.host_memory_bytes > device.memory_bytes


# Published ratios, from other tables than the files': Llama 3 (MFU of 989 TFLOP/s), Korthikanti et al. 2022 (A100 312),
# NVIDIA's "1.4x the bandwidth, nearly double the memory" of H200 over H100.
def test_published_figures():
    kinds = {name: load_cluster(name).device_kinds[0] for name in shipped_kinds()}
    assert kinds["H100"].peak_flops_per_s["bfloat16"] == pytest.approx(989e12, rel=1e-3)
    assert kinds["A100"].peak_flops_per_s["bfloat16"] == 312e12
    bandwidth = kinds["H200"].memory_bandwidth_bytes_per_s / kinds["H100"].memory_bandwidth_bytes_per_s
    assert bandwidth == pytest.approx(1.4, abs=0.05)
    assert 1.7 < kinds["H200"].memory_bytes / kinds["H100"].memory_bytes < 2
    assert "bfloat16" not in kinds["V100"].peak_flops_per_s
    assert "bfloat16" not in kinds["T4"].peak_flops_per_s


# Lanes of float32 per multiprocessor, two FLOPs per lane and cycle, by the boost clock.
@pytest.mark.parametrize(
    ("kind", "lanes"),
    [(kind, 128) for kind in ("A10G", "A6000", "L4", "L40S", "RTX3090", "RTX4090", "RTX5090")] + [("T4", 64)],
)
def test_float32_follows_from_multiprocessors_and_clock(kind, lanes):
    (device,) = load_cluster(kind).device_kinds
    rate = 2 * lanes * device.num_multiprocessors * device.clock_hz
    assert device.peak_flops_per_s["float32"] == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(("written", "kind"), [("2xRTX-4090", "RTX4090"), ("rtx-3090", "RTX3090"), ("4xh-100", "H100")])
def test_hyphens_of_kinds_may_be_written(written, kind):
    assert load_cluster(written).device_kinds[0].name == kind


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(shipped_kinds()))
def test_the_short_form(num_nodes, num_devices, kind):
    cluster = load_cluster(f"{num_nodes}x{num_devices}x{kind}")
    assert cluster.num_ranks == num_nodes * num_devices
    assert [node.num_devices for node in cluster.nodes] == [num_devices] * num_nodes
    assert [cluster.node_index(rank) for rank in range(cluster.num_ranks)] == [
        rank // num_devices for rank in range(cluster.num_ranks)
    ]
    assert {cluster.device_kind(rank).name for rank in range(cluster.num_ranks)} == {kind}
    assert len({node.name for node in cluster.nodes}) == num_nodes


def test_shorter_forms_and_any_case():
    assert load_cluster("4xa100").num_ranks == 4
    assert [node.num_devices for node in load_cluster("4xA100").nodes] == [4]
    assert load_cluster("h100").num_ranks == 1
    assert load_cluster("2xCPU").device_kinds[0].name == "cpu"


@pytest.mark.parametrize("reference", ["", "8", "8x", "xH100!", "-1xH100", "2 x H100", "8*H100", "H100\n"])
def test_what_is_no_cluster(reference):
    with pytest.raises(ClusterError, match=r"is not a cluster.*H100, 4xA100, 2x8xH100"):
        load_cluster(reference)


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(ClusterError, match="did you mean 'H100'"):
        load_cluster("8xH1000")
    with pytest.raises(ClusterError, match="known are A100, A10G"):
        load_cluster("8xquantum")


@pytest.mark.parametrize(
    "reference", ["0xH100", "0x8xH100", "8x0xH100", "1000001xH100", "1001x1000xH100", f"{10**30}xH100"]
)
def test_impossible_numbers_of_devices(reference):
    with pytest.raises(ClusterError, match="expected 1 to 1000000"):
        load_cluster(reference)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_cluster_from_a_file(tmp_path, suffix):
    assert load_cluster(write_document(CLUSTER, tmp_path / f"mine{suffix}")) == CLUSTER


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DocumentError, match="cannot be read"):
        load_cluster(tmp_path / "none.toml")


# --- links ---


def test_links_between_ranks():
    slow = Link(latency_s=9e-6, bandwidth_bytes_per_s=1e9)
    near, far = CLUSTER.nodes[0], replace(CLUSTER.nodes[0], name="n1", nic=slow)
    cluster = replace(CLUSTER, nodes=(near, far), racks=None, paths=())
    assert cluster.link_between(0, 1) == near.device_link
    assert cluster.link_between(2, 3) == far.device_link
    # the slower end of both: its latency from one node, its bandwidth from the other
    assert cluster.link_between(1, 2) == Link(latency_s=9e-6, bandwidth_bytes_per_s=1e8)
    assert cluster.link_between(2, 1) == cluster.link_between(1, 2)
    assert slow.seconds(1e9) == pytest.approx(1 + 9e-6)


@given(clusters())
def test_ranks_count_through_the_nodes(cluster):
    kinds = {kind.name: kind for kind in cluster.device_kinds}
    expected = [
        (index, kinds[group.kind])
        for index, node in enumerate(cluster.nodes)
        for group in node.devices
        for _ in range(group.count)
    ]
    assert cluster.num_ranks == len(expected) == sum(node.num_devices for node in cluster.nodes)
    assert [(cluster.node_index(rank), cluster.device_kind(rank)) for rank in range(cluster.num_ranks)] == expected


# --- what is refused ---


def device_kind(**changes):
    values = {"name": "X", "memory_bytes": 1, "memory_bandwidth_bytes_per_s": 1.0, "peak_flops_per_s": {"float32": 1.0}}
    return DeviceKind(source="", **{**values, **changes})


@pytest.mark.parametrize(
    "build",
    [
        lambda: Link(latency_s=-1.0, bandwidth_bytes_per_s=1.0),
        lambda: Link(latency_s=0.0, bandwidth_bytes_per_s=0.0),
        lambda: Link(latency_s=float("nan"), bandwidth_bytes_per_s=1.0),
        lambda: Link(latency_s=0.0, bandwidth_bytes_per_s=float("nan")),
        lambda: device_kind(memory_bytes=0),
        lambda: device_kind(memory_bandwidth_bytes_per_s=float("nan")),
        lambda: device_kind(peak_flops_per_s={}),
        lambda: device_kind(peak_flops_per_s={"float32": 0.0}),
        lambda: DeviceGroup(kind="X1", count=0),
        lambda: Cluster(name="", device_kinds=CLUSTER.device_kinds, nodes=()),
        lambda: replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], devices=()),)),
        lambda: replace(
            CLUSTER, nodes=(replace(CLUSTER.nodes[0], devices=(DeviceGroup(kind="X1", count=10**6 + 1),)),)
        ),
    ],
)
def test_clusters_that_cannot_be(build):
    with pytest.raises(ClusterError):
        build()


def test_a_node_with_a_kind_that_nobody_described():
    with pytest.raises(ClusterError, match=r"'X2'.*known are X1"):
        replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], devices=(DeviceGroup(kind="X2", count=1),)),))


@pytest.mark.parametrize(("written", "meant"), [("3x8H100", "3x8xH100"), ("4A100", "4xA100")])
def test_a_forgotten_x_is_suggested(written, meant):
    with pytest.raises(ClusterError, match=f"did you mean '{meant}'"):
        load_cluster(written)
    assert load_cluster(meant).name == meant


def test_columns_say_of_each_device_what_its_node_says():
    """Three nodes: two that differ in name only, and one with another card and two kinds of device."""
    shipped = load_cluster("2x4xA100")
    other = load_cluster("1xV100").device_kinds[0]
    first, second = shipped.nodes
    groups = (DeviceGroup(kind=first.devices[0].kind, count=1), DeviceGroup(kind=other.name, count=2))
    mixed = replace(first, name="mixed", devices=groups, num_nics=2)
    cluster = Cluster(
        name="three",
        device_kinds=(*shipped.device_kinds, other),
        nodes=(replace(first, num_nics=2), mixed, replace(second, num_nics=2)),
    )
    columns = cluster.columns()
    ranks = range(cluster.num_ranks)
    assert columns.node.tolist() == [cluster.node_index(rank) for rank in ranks] == [0] * 4 + [1] * 3 + [2] * 4
    kinds = [cluster.device_kinds[kind] for kind in columns.kind]
    assert kinds == [cluster.device_kind(rank) for rank in ranks]
    assert columns.node_kind.tolist() == [0] * 4 + [1] * 3 + [0] * 4
    assert columns.nic.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]
    assert cluster.columns() is columns


@pytest.mark.parametrize("num_nics", [0, -1, 10**20])
def test_a_node_has_nics(num_nics):
    with pytest.raises(ClusterError, match=f"has {num_nics} NICs; expected 1 to"):
        replace(CLUSTER.nodes[0], num_nics=num_nics)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"racks": Racks(nodes_per_rack=1, num_uplinks=1, uplink=CLUSTER.nodes[0].nic)}, ""),
        ({"paths": (NodePath(nodes=(0, 0), link=CLUSTER.nodes[0].nic),)}, "a path between nodes 0 and 0"),
        (
            {"paths": (NodePath(nodes=(0, 2), link=CLUSTER.nodes[0].nic),)},
            "nodes 0 and 2; expected two different nodes, numbered 0 to 1",
        ),
    ],
)
def test_paths_are_between_two_nodes_that_there_are(facts, words):
    if not words:
        assert replace(CLUSTER, **facts).rack_of(1) == 1
        return
    with pytest.raises(ClusterError, match=words):
        replace(CLUSTER, **facts)
    with pytest.raises(ClusterError, match="racks have 0 nodes"):
        Racks(nodes_per_rack=0, num_uplinks=1, uplink=CLUSTER.nodes[0].nic)
