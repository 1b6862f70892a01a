"""A cluster from what a machine has: GPUs by datasheet, cores by measurement, and where each figure comes from."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.host import (
    Described,
    Rates,
    TorchFacts,
    cluster_toml,
    describe_machine,
    devices_to_measure,
    find_machine,
    name_gpu,
)
from meshwright.host.gpus import know_gpu, known_gpus
from meshwright.spec import Cluster, ClusterError, Link, decode_document, load_cluster, shipped_kinds
from tests.host.machines import BRIDGED_QUERY, BRIDGED_TOPOLOGY, DGX_QUERY, DGX_TOPOLOGY, answering, make_host
from tests.host.test_links import port
from tests.host.test_processor import BIG, status

NO_TORCH = TorchFacts(installed=False, build={}, devices=(), pairs={})
MEMINFO = {"/proc/meminfo": f"MemTotal: {2048 * 2**20} kB\nMemAvailable: {2000 * 2**20} kB\n"}
FABRIC = {name: text for i in range(8) for name, text in port(f"mlx5_{i}").items()}
RATES = Rates(
    peak_flops_per_s={"float32": 1.6e11, "float64": 8e10},
    memory_bandwidth_bytes_per_s=1.4e10,
    link=Link(latency_s=5e-5, bandwidth_bytes_per_s=1.1e9),
    conditions="Measured 2026-11-21",
)


def describe(tmp_path, files, *, torch=NO_TORCH, rates=None, **answers):
    host = make_host(tmp_path, {**BIG, **status("0-127"), **files}, run=answering(**answers), name="node7")
    return describe_machine(find_machine(host, torch), rates or {})


def torch_sees(*rows):
    return TorchFacts(installed=True, build={}, devices=tuple(rows), pairs={})


def test_a_node_of_eight_h100_is_the_shipped_one_as_far_as_that_goes(tmp_path):
    described = describe(tmp_path, {**MEMINFO, **FABRIC}, query=DGX_QUERY, topology=DGX_TOPOLOGY)
    found, shipped = described.cluster, load_cluster("8xH100")
    assert found.device_kinds == shipped.device_kinds
    (node,), (other,) = found.nodes, shipped.nodes
    assert (node.device_link, node.pcie, node.nic, node.num_nics) == (
        other.device_link,
        other.pcie,
        other.nic,
        other.num_nics,
    )
    assert node.num_devices == 8
    assert (node.num_cores, node.host_memory_bytes) == (64, 2048 * 2**30)
    assert described.remarks["nodes.0.device_link"].startswith("found: at least 18 NVLinks per pair")


def test_bridged_pairs_are_described_by_the_slowest_pair(tmp_path):
    described = describe(tmp_path, MEMINFO, query=BRIDGED_QUERY, topology=BRIDGED_TOPOLOGY)
    (kind,), (node,) = described.cluster.device_kinds, described.cluster.nodes
    assert (kind.name, kind.memory_bytes, kind.memory_bandwidth_bytes_per_s) == ("A100-PCIe", 80 * 2**30, 1.935e12)
    assert node.device_link == node.pcie
    assert node.pcie.bandwidth_bytes_per_s == 32e9
    assert "some pair of GPUs has no NVLink" in described.remarks["nodes.0.device_link"]
    assert described.remarks["nodes.0.nic"].startswith("not found")


def test_torch_decides_which_gpus_there_are_and_the_driver_how_they_are_joined(tmp_path):
    uuids = ["11111110-aaaa-bbbb-cccc-dddddddddddd", "11111111-aaaa-bbbb-cccc-dddddddddddd"]
    seen = [{"name": "NVIDIA A100 80GB PCIe", "memory_bytes": 84_970_000_000, "uuid": uuid} for uuid in uuids]
    described = describe(tmp_path, MEMINFO, torch=torch_sees(*seen), query=BRIDGED_QUERY, topology=BRIDGED_TOPOLOGY)
    (node,) = described.cluster.nodes
    assert node.num_devices == 2
    assert described.cluster.device_kinds[0].memory_bytes == 84_970_000_000
    assert node.device_link.bandwidth_bytes_per_s == 12 * 25e9, "GPU0 and GPU1 are bridged"


def test_unequal_gpus_stay_in_their_order(tmp_path):
    query = "".join(
        f"{index}, {name}, 46068, 550.1, 4, 16, GPU-{index}\n"
        for index, name in enumerate(["NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA H100 PCIe", "NVIDIA L40S"])
    )
    (node,) = describe(tmp_path, MEMINFO, query=query).cluster.nodes
    assert [(group.kind, group.count) for group in node.devices] == [("L40S", 1), ("H100-PCIe", 2), ("L40S", 1)]


def test_a_gpu_that_nobody_described_is_measured_or_refused(tmp_path):
    query = "0, NVIDIA GeForce RTX 4080, 24564, 550.1, 4, 16, GPU-0\n"
    with pytest.raises(ClusterError, match=r"RTX 4080.*Install torch"):
        describe(tmp_path, MEMINFO, query=query)
    described = describe(tmp_path, MEMINFO, query=query, rates={"NVIDIA GeForce RTX 4080": RATES})
    (kind,) = described.cluster.device_kinds
    assert kind.peak_flops_per_s == RATES.peak_flops_per_s
    assert kind.memory_bytes == 24564 * 2**20
    assert described.remarks["device_kinds.0.peak_flops_per_s"] == "measured: see source"


def test_without_a_gpu_each_core_is_a_device(tmp_path):
    described = describe(tmp_path, MEMINFO, rates={"cpu": RATES})
    (kind,), (node,) = described.cluster.device_kinds, described.cluster.nodes
    assert (kind.name, node.num_devices, node.num_cores) == ("cpu", 64, 64)
    assert kind.memory_bytes == 2000 * 2**30 // 64
    assert kind.peak_flops_per_s == RATES.peak_flops_per_s
    assert node.device_link == RATES.link
    assert node.pcie.bandwidth_bytes_per_s == 0.7e10, "half of what a copy reads and writes"


def test_a_machine_that_tells_nothing_is_described_by_what_is_shipped(tmp_path):
    host = make_host(tmp_path)
    described = describe_machine(find_machine(host, NO_TORCH), {})
    shipped = load_cluster("cpu")
    assert described.cluster.device_kinds[0].peak_flops_per_s == shipped.device_kinds[0].peak_flops_per_s
    assert described.remarks["device_kinds.0.peak_flops_per_s"] == "shipped: not measured here"
    assert described.remarks["nodes.0.host_memory_bytes"].startswith("not reported")


def test_what_has_to_be_measured(tmp_path):
    query = "0, NVIDIA L40S, 46068, 1, 4, 16, GPU-0\n" + "".join(
        f"{index}, NVIDIA RTX A5000, 49140, 1, 4, 16, GPU-{index}\n" for index in (1, 2)
    )
    known_and_not = make_host(tmp_path / "a", run=answering(query=query))
    assert devices_to_measure(find_machine(known_and_not, NO_TORCH)) == {"NVIDIA RTX A5000": "cuda:1"}
    assert devices_to_measure(find_machine(make_host(tmp_path / "b"), NO_TORCH)) == {"cpu": "cpu"}


@pytest.mark.parametrize(
    ("name", "kind", "bandwidth", "bfloat16"),
    [
        # Memory bandwidth and dense bfloat16 of the datasheets.
        ("NVIDIA H100 80GB HBM3", "H100", 3.35e12, 989.4e12),
        ("NVIDIA H100 PCIe", "H100-PCIe", 2.0e12, 756.5e12),
        ("NVIDIA H100 NVL", "H100-NVL", 3.9e12, 835.5e12),
        ("NVIDIA H200", "H200", 4.8e12, 989.4e12),
        ("NVIDIA H200 NVL", "H200-NVL", 4.8e12, 835.5e12),
        ("NVIDIA A100-SXM4-80GB", "A100", 2.039e12, 312e12),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 1.555e12, 312e12),
        ("A100-PCIE-40GB", "A100-40GB", 1.555e12, 312e12),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe", 1.935e12, 312e12),
        ("NVIDIA L40S", "L40S", 0.864e12, 362.05e12),
        ("NVIDIA B200", "B200", 7.7e12, 2250e12),
        ("Tesla V100-SXM2-32GB", "V100", 0.9e12, None),
        ("Tesla V100-PCIE-16GB", "V100-PCIe", 0.9e12, None),
        ("NVIDIA L4", "L4", 0.3e12, 121e12),
        ("NVIDIA A10G", "A10G", 0.6e12, 70e12),
        ("Tesla T4", "T4", 0.32e12, None),
        ("NVIDIA GeForce RTX 3090", "RTX3090", 0.936e12, 71e12),
        ("NVIDIA GeForce RTX 4090", "RTX4090", 1.008e12, 165.2e12),
        ("NVIDIA GeForce RTX 5090", "RTX5090", 1.792e12, 209.5e12),
        ("NVIDIA RTX A6000", "A6000", 0.768e12, 154.8e12),
    ],
)
def test_names_of_drivers_lead_to_datasheets(name, kind, bandwidth, bfloat16):
    found = know_gpu(name).describe(7 * 2**30)
    assert name_gpu(name) == found.name
    assert (found.name, found.memory_bandwidth_bytes_per_s) == (kind, bandwidth)
    assert found.peak_flops_per_s.get("bfloat16") == bfloat16
    assert found.memory_bytes == 7 * 2**30


@pytest.mark.parametrize(
    "name", ["NVIDIA H800", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4080", "NVIDIA L40", "A10", "", "H100"]
)
def test_other_names_are_not_guessed(name):
    assert know_gpu(name) is None


def test_a_gpu_that_nobody_described_is_called_as_its_driver_does():
    assert name_gpu("NVIDIA GeForce RTX 4080") == "GeForce-RTX-4080"


def test_every_shipped_gpu_is_known_by_some_name():
    # GPUs are found by nvidia-smi, which knows none of AMD's.
    assert {row.kind for row in known_gpus()} == set(shipped_kinds()) - {"cpu", "MI300X"}


@given(name=st.text(), source=st.text(), latency=st.floats(0, 1), bandwidth=st.floats(1e-3, 1e15))
def test_a_file_reads_back_as_the_cluster_that_was_found(name, source, latency, bandwidth):
    from dataclasses import replace

    shipped = load_cluster("2x4xA100")
    link = Link(latency_s=latency, bandwidth_bytes_per_s=bandwidth)
    # Half of a surrogate pair is no character, and no file can hold it.
    name, source = (text.encode("utf-8", "replace").decode() for text in (name, source))
    nodes = tuple(replace(node, name=name, device_link=link, source=source) for node in shipped.nodes)
    cluster = replace(shipped, name=name, nodes=nodes)
    remarks = {"nodes.0.device_link": name, "device_kinds.0.peak_flops_per_s": source}
    text = cluster_toml(Described(cluster=cluster, remarks=remarks), "heading")
    assert decode_document(Cluster, tomllib.loads(text), "file") == cluster


def test_each_figure_of_a_file_says_where_it_comes_from(tmp_path):
    described = describe(tmp_path, {**MEMINFO, **FABRIC}, query=DGX_QUERY, topology=DGX_TOPOLOGY)
    lines = cluster_toml(described, "heading").splitlines()
    for key in ("memory_bytes", "memory_bandwidth_bytes_per_s", "device_link", "pcie", "nic", "host_memory_bytes"):
        (line,) = (line for line in lines if line.startswith(f"{key} ="))
        assert line.partition("  # ")[2].split(":")[0] in ("found", "datasheet", "measured"), line
