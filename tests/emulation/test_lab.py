"""Labs of real namespaces and groups: what stands, what changes, and that nothing is left however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.emulation import Emulated, open_lab
from meshwright.emulation.janitor import PREFIX
from meshwright.emulation.layout import rank_shares
from meshwright.emulation.quotas import CpuGroups, find_cpu_groups, group_name, start_time, sweep
from meshwright.spec import RunError
from meshwright.spec.scenario import Scenario, SlowDevice, SlowLink
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import Seconds
from tests.emulation.clusters import SHARED_NICS
from tests.host.machines import make_host
from tests.project import ROOT

WAIT_S = 30


class Launched:
    """A lab process of four waiting ranks."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.emulation.lab_process", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = json.loads(self.process.stdout.readline())
        self.group = find_cpu_groups()[0] / group_name(self.process.pid)

    def left(self):
        """Return processes, groups and namespaces of the lab that still exist."""
        processes = [
            pid
            for pid in (self.process.pid, *self.facts["ranks"], *self.facts["janitor"])
            if start_time(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        ]
        inodes = {f"net:[{said['namespace']}]" for said in self.facts["said"]}
        open_files = {link_of(path) for pid in Path("/proc").glob("[0-9]*") for path in open_of(pid)}
        return processes + [self.group] * self.group.exists() + sorted(inodes & open_files)

    def wait_until_gone(self):
        end = time.monotonic() + WAIT_S
        while self.left() and time.monotonic() < end:
            time.sleep(0.05)
        return self.left()

    def close(self):
        for pid in (self.process.pid, *self.facts["ranks"], *self.facts["janitor"]):
            if start_time(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(WAIT_S)
        self.process.stdin.close()
        self.process.stdout.close()
        sweep(find_cpu_groups()[0])


def open_of(pid):
    try:
        return [pid / "ns" / "net", *(pid / "fd").iterdir()]
    except OSError:
        return []


def link_of(path):
    try:
        return str(path.readlink())
    except OSError:
        return ""


@pytest.fixture
def launched(tmp_path):
    found = Launched(tmp_path)
    yield found
    found.close()


@pytest.mark.root
def test_ranks_are_inside(launched):
    said = launched.facts["said"]
    namespaces = [rank["namespace"] for rank in said]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert Path("/proc/self/ns/net").stat().st_ino not in namespaces
    assert [rank["group"].rpartition("/")[2] for rank in said] == [f"rank{rank}" for rank in range(4)]
    # tc prints bytes per second: those of frames for 62.5 MB/s of messages.
    assert {rank["queue"]["options"]["rate"] for rank in said} == {65348756}
    assert {rank["store"] for rank in said} == {"10.77.0.1"}
    share = rank_shares(SHARED_NICS, len(os.sched_getaffinity(0)))[0]
    end = time.monotonic() + WAIT_S
    while read_share(launched.group / "rank3") != pytest.approx(share, rel=0.01) and time.monotonic() < end:
        time.sleep(0.01)
    assert read_share(launched.group / "rank3") == pytest.approx(share, rel=0.01)


def read_share(folder):
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return None if quota == "max" else int(quota) / int(period)


@pytest.mark.root
@pytest.mark.matrix
@pytest.mark.parametrize("killed", ["launcher", "rank", "janitor", "nobody"])
def test_nothing_is_left(launched, killed):
    pids = {"launcher": launched.process.pid, "rank": launched.facts["ranks"][1]}
    if killed != "nobody":
        os.kill(pids.get(killed, launched.facts["janitor"][0]), signal.SIGKILL)
    if killed != "launcher":
        launched.process.stdin.write("end\n")
        launched.process.stdin.flush()
    launched.process.wait(WAIT_S)
    assert launched.wait_until_gone() == []


@pytest.mark.root
@pytest.mark.long
def test_what_a_dead_launcher_and_janitor_left_is_swept(launched):
    for pid in (*launched.facts["janitor"], launched.process.pid):
        os.kill(pid, signal.SIGKILL)
    launched.process.wait(WAIT_S)
    assert launched.group.exists()
    sweep(find_cpu_groups()[0])
    assert launched.wait_until_gone() == []


@pytest.mark.root
def test_links_and_shares_change_at_their_moments(tmp_path):
    effects = (
        SlowLink(links=Links("between nodes"), factor=2.0, since=Seconds(0.2)),
        SlowDevice(devices=Devices("rank 0"), factor=4.0, since=Seconds(0.2)),
    )
    emulated = Emulated(cluster=SHARED_NICS, devices=(0, 1, 2, 3), scenario=Scenario(effects=effects))
    cores = len(os.sched_getaffinity(0))
    wanted = [rank_shares(cluster, cores) for _, cluster in emulated.states()]
    with open_lab(emulated, tmp_path) as lab:
        folder = find_cpu_groups()[0] / group_name(os.getpid()) / "rank0"
        lab.start_clock()
        end = time.monotonic() + WAIT_S
        while read_share(folder) != pytest.approx(wanted[1][0], rel=0.02) and time.monotonic() < end:
            time.sleep(0.01)
        assert read_share(folder) == pytest.approx(wanted[1][0], rel=0.02)
        done = subprocess.run(
            [sys.executable, *lab.arguments, "tests.emulation.waiting_rank"],
            env={**os.environ, "RANK": "3"},
            cwd=ROOT,
            capture_output=True,
            timeout=WAIT_S,
            check=True,
        )
        assert json.loads(done.stdout)["queue"]["options"]["rate"] == 32674378
    assert not folder.parent.exists()


def test_a_machine_without_quotas_is_refused(tmp_path):
    with pytest.raises(RunError, match="no cgroup controller 'cpu' is mounted"):
        find_cpu_groups(make_host(tmp_path, {"/proc/self/cgroup": "4:memory:/a\n0::/a\n"}))


OWN = {"/proc/self/cgroup": "2:cpu,cpuacct:/job\n0::/job\n"}
OLDER = {"/sys/fs/cgroup/cpu,cpuacct/cgroup.procs": "1", "/sys/fs/cgroup/cpu,cpuacct/job/cgroup.procs": "2"}
NEWER = {"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (NEWER, (Path("/sys/fs/cgroup"), 2)),
        (OLDER, (Path("/sys/fs/cgroup/cpu,cpuacct"), 1)),
        (OLDER | NEWER, (Path("/sys/fs/cgroup/cpu,cpuacct"), 1)),
    ],
)
def test_the_top_of_the_groups_is_found(tmp_path, files, found):
    assert find_cpu_groups(make_host(tmp_path, OWN | files)) == found


def test_groups_of_version_2_are_written(tmp_path):
    groups = CpuGroups(tmp_path, 2, f"{PREFIX}1")
    groups.make(2)
    groups.limit(1, 0.25)
    assert (groups.rank_folder(1) / "cpu.max").read_text() == "1250 5000"
    groups.limit(0, 0.02)
    assert (groups.rank_folder(0) / "cpu.max").read_text() == "1000 50000"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_group_that_stays_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.emulation.janitor._GIVE_UP_S", 0.05)
    groups = CpuGroups(tmp_path, 2, f"{PREFIX}1")
    groups.make(1)
    # The kernel refuses to remove a group with a process, as this file system a folder with a file.
    (groups.rank_folder(0) / "cpu.max").write_text("max 100000")
    with pytest.raises(RunError, match="a process in this cgroup does not end"):
        groups.remove()


def test_without_the_rights_or_programs_it_is_refused(monkeypatch):
    emulated = Emulated(cluster=SHARED_NICS, devices=(0, 1, 2, 3))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RunError, match="which needs root"), open_lab(emulated, Path()):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RunError, match=r"needs ip and tc\. Install iproute2\."), open_lab(emulated, Path()):
        pass
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RunError, match="namespaces of Linux"), open_lab(emulated, Path()):
        pass
