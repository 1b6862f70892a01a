"""Memory that is left by host and cgroup, shared memory, the temporary folder."""

from pathlib import Path

from meshwright.host import Host
from meshwright.host.memory_limits import check_memory, find_memory
from tests.host.machines import make_host

GIB = 2**30
MEMINFO = {"/proc/meminfo": f"MemTotal:       {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:   {60 * 2**20} kB\n"}


def named(host, name):
    return next(finding for finding in check_memory(host) if finding.name == name)


def test_memory_is_read_in_bytes(tmp_path):
    found = find_memory(make_host(tmp_path, MEMINFO))
    assert (found.total_bytes, found.available_bytes, found.limit_bytes) == (64 * GIB, 60 * GIB, None)


def test_a_cgroup_leaves_its_limit_less_what_is_in_use_and_not_merely_cached(tmp_path):
    group = {
        "/proc/self/cgroup": "0::/job\n",
        "/sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
        "/sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
    }
    host = make_host(tmp_path, {**MEMINFO, **group})
    found = find_memory(host)
    assert (found.available_bytes, found.limit_bytes) == ((8 - 5 + 2) * GIB, 8 * GIB)
    limit = named(host, "cgroup limit")
    assert limit.status == "note"
    assert "8 GiB of 64 GiB" in limit.found


def test_the_number_for_no_limit_is_no_limit(tmp_path):
    group = {
        "/proc/self/cgroup": "9:memory:/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
    }
    assert find_memory(make_host(tmp_path, {**MEMINFO, **group})).limit_bytes is None


def test_a_limit_of_version_1_counts(tmp_path):
    group = {
        "/proc/self/cgroup": "9:memory:/docker/1\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB - 1000}\n",
    }
    host = make_host(tmp_path, {**MEMINFO, **group})
    assert find_memory(host).available_bytes == 1000
    assert named(host, "host memory").status == "problem"


def test_little_shared_memory_is_a_note_with_the_remedy(tmp_path):
    host = make_host(tmp_path, {**MEMINFO, "/dev/shm/": ""}, space=lambda _: (64 * 2**20, 64 * 2**20))
    assert named(host, "shared memory").status == "note"
    assert "--shm-size" in named(host, "shared memory").remedy


def test_a_temporary_folder_that_cannot_be_used_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    host = make_host(tmp_path / "root", MEMINFO, environment={"TMPDIR": str(file / "inside")})
    finding = named(host, "temporary folder")
    assert finding.status == "note"
    assert str(file / "inside") in finding.found
    assert "TMPDIR" in finding.remedy


def test_no_temporary_folder_at_all_is_a_problem(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("meshwright.host.memory_limits.tempfile.gettempdir", none)
    assert named(make_host(tmp_path, MEMINFO), "temporary folder").status == "problem"


def test_a_machine_that_tells_nothing_is_not_known(tmp_path):
    host = make_host(tmp_path)
    assert find_memory(host).total_bytes is None
    assert named(host, "host memory").found == "not known"
    assert named(host, "shared memory").found.startswith("not known")


def test_the_memory_of_this_machine_is_that_of_the_c_library():
    import os

    found = find_memory(Host()).total_bytes
    assert found is not None
    if Path("/proc/meminfo").exists():
        # MemTotal leaves out what the kernel keeps for itself on some machines.
        assert abs(found - os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) < 0.1 * found
