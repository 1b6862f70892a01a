"""GPUs, their topology and network cards, from texts in the form of nvidia-smi and of /sys (written, not recorded)."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.host import Host, find_gpu_state
from meshwright.host.gpus import check_gpus, describe_topology, parse_gpus, parse_topology, pcie_bytes_per_s
from meshwright.host.host import NOT_FOUND, Ran
from meshwright.host.reach import check_nics, choose_nics, find_fabric, find_interfaces, parse_rate
from tests.host.machines import (
    BRIDGED_TOPOLOGY,
    DGX_QUERY,
    DGX_TOPOLOGY,
    answering,
    make_host,
)


def test_the_query_gives_each_gpu():
    gpus = parse_gpus(DGX_QUERY)
    assert [gpu.index for gpu in gpus] == list(range(8))
    assert gpus[0].memory_bytes == 85520809984, "81559 MiB"
    assert gpus[0].pcie_bytes_per_s == 64e9, "PCIe 5.0 x16 by the datasheet"
    assert gpus[0].driver == "550.54.15"


def test_fields_that_a_gpu_does_not_tell_are_not_known():
    (gpu,) = parse_gpus("0, NVIDIA GB10, 122880, 580.1, [N/A], [N/A], GPU-1\nWARNING: infoROM is corrupted\n")
    assert gpu.pcie_bytes_per_s is None
    assert parse_gpus("0, NVIDIA GB10, [N/A], 580.1, 5, 16, GPU-1\n") == ()


@pytest.mark.parametrize(
    ("generation", "width", "datasheet"), [(3, 16, 16e9), (4, 16, 32e9), (5, 16, 64e9), (4, 8, 16e9)]
)
def test_pcie_links_are_as_fast_as_datasheets_say(generation, width, datasheet):
    assert pcie_bytes_per_s(generation, width) == datasheet


def test_a_switched_node_has_the_same_links_between_all_pairs():
    topology = parse_topology(DGX_TOPOLOGY)
    assert topology.names == (*(f"GPU{i}" for i in range(8)), "NIC0", "NIC1")
    assert set(topology.gpu_joints) == set(combinations([f"GPU{i}" for i in range(8)], 2))
    assert set(topology.gpu_joints.values()) == {"NV18"}
    assert topology.joints["GPU0", "NIC0"] == "PIX"
    assert topology.joints["GPU0", "NIC1"] == "SYS"
    assert topology.fewest_nvlinks() == 18
    assert describe_topology(topology) == "28 pairs NV18"


def test_a_bridge_joins_only_its_pair():
    topology = parse_topology(BRIDGED_TOPOLOGY)
    assert describe_topology(topology) == "2 pairs NV12, 4 pairs SYS"
    assert topology.fewest_nvlinks() == 0
    assert topology.fewest_nvlinks(("GPU0", "GPU1")) == 12


@given(st.integers(2, 6), st.data())
def test_a_matrix_is_read_as_it_was_drawn(count, data):
    names = [f"GPU{i}" for i in range(count)]
    kinds = st.sampled_from(["NV1", "NV12", "PIX", "PXB", "PHB", "NODE", "SYS"])
    joints = {pair: data.draw(kinds) for pair in combinations(names, 2)}

    def cell(row, column):
        return " X " if row == column else joints[min((row, column), (column, row))]

    rows = ["\t".join([row, *(cell(row, column) for column in names), "0-7", "0"]) for row in names]
    text = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\n" + "\n".join(rows)
    assert parse_topology(text).joints == joints


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    parse_gpus(text)
    parse_topology(text)
    parse_topology("\tGPU0\tGPU1\n" + text)
    parse_rate(text)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Ran(code=None), "did not answer"),
        (Ran(code=9, output="NVIDIA-SMI has failed because it couldn't communicate with the driver.\n"), "has failed"),
    ],
)
def test_a_driver_that_shows_nothing_is_a_problem(tmp_path, answer, words):
    (finding,) = check_gpus(make_host(tmp_path, run=lambda *_: answer))
    assert finding.status == "problem"
    assert words in finding.found


def test_no_driver_is_no_problem(tmp_path):
    (finding,) = check_gpus(make_host(tmp_path, run=lambda *_: Ran(code=NOT_FOUND)))
    assert (finding.status, finding.found) == ("ok", "none (no nvidia-smi)")


def test_gpus_are_told_with_driver_links_and_pcie(tmp_path):
    host = make_host(tmp_path, run=answering(query=DGX_QUERY, topology=DGX_TOPOLOGY))
    told = {finding.name: finding.found for finding in check_gpus(host)}
    assert told["GPU"] == "8 × NVIDIA H100 80GB HBM3, 79.6 GiB each"
    assert told["NVIDIA driver"] == "550.54.15"
    assert told["between GPUs"] == "28 pairs NV18"


def port(card, *, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", layer="InfiniBand"):
    folder = f"/sys/class/infiniband/{card}/ports/1"
    return {f"{folder}/state": f"{state}\n", f"{folder}/rate": f"{rate}\n", f"{folder}/link_layer": f"{layer}\n"}


def interface(name, *, speed="25000", state="up", device=True):
    folder = f"/sys/class/net/{name}"
    files = {f"{folder}/operstate": f"{state}\n"}
    files |= {f"{folder}/speed": f"{speed}\n"} if speed is not None else {}
    return files | ({f"{folder}/device/": ""} if device else {})


def test_the_fastest_equal_ports_of_infiniband_come_before_ethernet(tmp_path):
    slow = port("mlx5_8", rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    fast = {name: text for i in range(8) for name, text in port(f"mlx5_{i}").items()}
    host = make_host(tmp_path, {**fast, **slow, **interface("eth0", speed="100000")})
    chosen = choose_nics(host)
    assert [nic.name for nic in chosen] == [f"mlx5_{i}/1" for i in range(8)]
    assert {nic.bytes_per_s for nic in chosen} == {50e9}
    assert {nic.kind for nic in find_fabric(host)} == {"InfiniBand", "RoCE"}


def test_ethernet_without_virtual_and_idle_interfaces(tmp_path):
    files = {
        **interface("lo", speed=None, state="unknown", device=False),
        **interface("docker0", speed="10000", device=False),
        **interface("ens5", speed="25000"),
        **interface("ens6", speed="100000", state="down"),
        **port("mlx5_0", state="1: DOWN"),
    }
    host = make_host(tmp_path, files)
    assert [nic.name for nic in choose_nics(host)] == ["ens5"]
    assert choose_nics(host)[0].bytes_per_s == 25e9 / 8
    assert {nic.name for nic in find_interfaces(host) if nic.virtual} == {"docker0"}
    told = {finding.found: finding.status for finding in check_nics(host)}
    assert told["mlx5_0/1: InfiniBand, 46.6 GiB/s, down"] == "note"


def test_a_card_whose_speed_is_not_told_is_a_card(tmp_path):
    host = make_host(tmp_path, interface("eth0", speed="-1"))
    assert [(nic.name, nic.bytes_per_s) for nic in choose_nics(host)] == [("eth0", None)]
    assert "speed not known" in next(iter(check_nics(host))).found


def test_no_card_is_told(tmp_path):
    assert choose_nics(make_host(tmp_path)) == ()
    assert next(iter(check_nics(make_host(tmp_path)))).found == "not known"


@pytest.mark.parametrize(("busy", "warned"), [(0, False), (4, False), (87, True)])
def test_a_gpu_that_others_use_is_told(busy, warned):
    lines = f"GPU-other, 300, 1980, 99, 10\nGPU-1-2, 1755, 1980, {busy}, 2048\nGPU-odd, [N/A], 1, 1, 1\n"
    host = Host(run=lambda command, _: Ran(code=0, output=lines if "utilization.gpu" in command[1] else ""))
    state = find_gpu_state(host, "1-2")
    assert state.clocks == "SM clock 1755 of 1980 MHz"
    assert bool(state.warnings()) == warned
    if warned:
        assert "busy for 87%" in state.warnings()[0]
        assert "End that program, or choose another GPU with --device" in state.warnings()[0]
    assert find_gpu_state(host, "odd") is None
    assert find_gpu_state(host, "absent") is None
