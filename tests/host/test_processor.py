"""Cores after affinity, hardware threads, and the quotas of both versions of cgroups."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.host import Host
from meshwright.host.memory_limits import cgroup_folders
from meshwright.host.processor import check_processor, find_processor, parse_list
from tests.host.machines import make_host

# 64 cores with two hardware threads each: thread i and i + 64 share a core.
SIBLINGS = {
    f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 64},{i % 64 + 64}\n" for i in range(128)
}
BIG = {
    "/proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7742 64-Core Processor\n",
    "/sys/devices/system/cpu/online": "0-127\n",
    "/sys/devices/system/node/node0/": "",
    "/sys/devices/system/node/node1/": "",
    "/sys/devices/system/node/possible": "0-1\n",
    **SIBLINGS,
}


def status(allowed: str) -> dict[str, str]:
    return {"/proc/self/status": f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n"}


def test_two_hardware_threads_of_a_core_are_one_core(tmp_path):
    found = find_processor(make_host(tmp_path, {**BIG, **status("0-127")}))
    assert (found.num_threads, found.num_allowed_threads, found.num_cores) == (128, 128, 64)
    assert found.num_numa_nodes == 2
    assert found.name == "AMD EPYC 7742 64-Core Processor"


def test_affinity_to_both_threads_of_two_cores_leaves_two_cores(tmp_path):
    assert find_processor(make_host(tmp_path, {**BIG, **status("0-1,64-65")})).num_cores == 2


def test_the_smallest_quota_on_the_way_up_binds(tmp_path):
    quotas = {
        "/proc/self/cgroup": "0::/user.slice/job\n",
        "/sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/user.slice/cpu.max": "350000 100000\n",
    }
    found = find_processor(make_host(tmp_path, {**BIG, **status("0-127"), **quotas}))
    assert found.quota == 3.5
    assert found.num_cores == 3


def test_the_quota_of_version_1_counts_and_minus_one_is_none(tmp_path):
    line = {"/proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n"}
    free = {**line, "/sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "-1\n"}
    assert find_processor(make_host(tmp_path / "a", {**BIG, **status("0-7"), **free})).quota is None
    # Inside the container only the top of the hierarchy is there.
    bound = {
        **line,
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    found = find_processor(make_host(tmp_path / "b", {**BIG, **status("0-7"), **bound}))
    assert found.quota == 0.5
    assert found.num_cores == 1, "half a core still runs one rank"


def test_a_limit_is_a_note_that_names_it(tmp_path):
    host = make_host(tmp_path, {**BIG, **status("0-3")})
    cores = next(finding for finding in check_processor(host) if finding.name == "cores")
    assert cores.status == "note"
    assert "affinity allows 4" in cores.found
    assert "4 ranks" in cores.remedy


def test_a_machine_that_tells_nothing_has_the_cores_that_python_counts(tmp_path):
    found = find_processor(make_host(tmp_path))
    assert found.num_cores == (os.cpu_count() or 1)
    assert found.num_numa_nodes is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_the_affinity_of_this_process_is_what_the_system_says():
    assert find_processor(Host()).num_allowed_threads == len(os.sched_getaffinity(0))


@given(st.sets(st.integers(0, 300)))
def test_lists_of_numbers_are_read_as_the_kernel_writes_them(numbers):
    text = ",".join(str(number) for number in sorted(numbers))
    assert parse_list(text) == sorted(numbers)


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1-2-3", "0-99999999999"])
def test_an_odd_list_is_no_list(text):
    assert parse_list(text) == []


def test_folders_of_a_cgroup_go_from_its_own_to_the_top(tmp_path):
    host = make_host(tmp_path, {"/proc/self/cgroup": "0::/a/b\n"})
    assert cgroup_folders(host, "")[:3] == ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]
    assert cgroup_folders(host, "memory") == []
