"""The processor of this machine, and the number of its cores that this process may use.

cores = min(cores that the affinity mask allows, whole cores of the cgroup's quota). Two hardware threads of one core
count once, because they share its arithmetic units. Sources: proc(5) for ``Cpus_allowed_list``; the kernel's
Documentation/admin-guide/cgroup-v2.rst (``cpu.max``) and scheduler/sched-bwc.rst (``cpu.cfs_quota_us``).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.host.findings import Finding
from meshwright.host.host import Host
from meshwright.host.memory_limits import cgroup_folders
from meshwright.spec import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """The processor, and how much of it this process may use.

    ``num_threads`` counts all hardware threads; ``num_allowed_threads`` and ``num_allowed_cores`` those that the
    affinity mask allows. ``quota`` is the number of cores that the cgroup grants (may be fractional; None: no quota).
    ``num_numa_nodes`` is None if the system does not report it.
    """

    name: str
    num_threads: int
    num_allowed_threads: int
    num_allowed_cores: int
    quota: float | None
    num_numa_nodes: int | None

    @property
    def num_cores(self) -> int:
        """Number of whole cores that this process may use at the same time, after affinity and quota; at least 1."""
        granted = self.num_allowed_cores if self.quota is None else min(self.num_allowed_cores, int(self.quota))
        return max(1, granted)


def find_processor(host: Host) -> Processor:
    """Read the processor's name, cores, affinity, quota and NUMA nodes.

    Name and thread count come from Python's ``platform`` and ``os`` if ``/proc`` and ``/sys`` do not report them.
    """
    allowed = parse_list(_status_field(host, "Cpus_allowed_list"))
    num_threads = _count_threads(host)
    if not allowed:
        allowed = list(range(num_threads))
    siblings = {
        host.read(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list") or str(thread)
        for thread in allowed
    }
    num_numa_nodes = sum(name.startswith("node") and name[4:].isdigit() for name in host.names(_NUMA_FOLDER))
    return Processor(
        name=processor_name(host),
        num_threads=max(num_threads, len(allowed)),
        num_allowed_threads=len(allowed),
        num_allowed_cores=len(siblings),
        quota=_find_quota(host),
        num_numa_nodes=num_numa_nodes or None,
    )


def processor_name(host: Host) -> str:
    """Return the processor's model name from /proc/cpuinfo, else from Python's ``platform``."""
    lines = (host.read("/proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine() or "not known"


def check_processor(host: Host) -> Iterator[Finding]:
    """Report the processor's name, the cores that may be used, and the number of NUMA nodes."""
    found = find_processor(host)
    yield Finding(area="devices", name="processor", found=found.name)
    threads = format_count(found.num_threads, "hardware thread")
    text = f"{format_count(found.num_cores, 'core')} may be used of {threads}"
    bound = [f"affinity allows {found.num_allowed_threads}"] if found.num_allowed_threads < found.num_threads else []
    if found.quota is not None and found.quota < found.num_allowed_cores:
        bound.append(f"the cgroup's quota is {found.quota:g} cores")
    cores = Finding(area="devices", name="cores", found=f"{text} ({', '.join(bound)})" if bound else text)
    remedy = f"Start at most {found.num_cores} ranks here, or lift the limit (taskset, docker --cpus, --cpuset-cpus)."
    yield cores.amended("note", remedy, "fewer-cores-than-the-machine-has") if bound else cores
    nodes = "not known" if found.num_numa_nodes is None else str(found.num_numa_nodes)
    yield Finding(area="devices", name="NUMA nodes", found=nodes)


_NUMA_FOLDER = "/sys/devices/system/node"


def parse_list(text: str) -> list[int]:
    """Parse the kernel's lists of numbers: ``0-3,8`` → 0, 1, 2, 3, 8; an invalid text gives an empty list."""
    numbers: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            start, stop = int(first), int(last if dash else first)
            if stop - start > 2**16:
                return []
            numbers += range(start, stop + 1)
    except ValueError:
        return []
    return numbers


def _status_field(host: Host, name: str) -> str:
    lines = (host.read("/proc/self/status") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _count_threads(host: Host) -> int:
    listed = parse_list(host.read("/sys/devices/system/cpu/online") or "")
    return len(listed) or os.cpu_count() or 1


def _find_quota(host: Host) -> float | None:
    """The smallest quota among the process's cgroup and those above it, in cores."""
    quotas = []
    for folder in cgroup_folders(host, ""):
        granted, _, period = (host.read(f"{folder}/cpu.max") or "").partition(" ")
        if granted.isdigit() and period.isdigit() and int(period):
            quotas.append(int(granted) / int(period))
    for folder in cgroup_folders(host, "cpu"):
        granted_us, period_us = (host.read_number(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if granted_us is not None and granted_us > 0 and period_us:
            quotas.append(granted_us / period_us)
    return min(quotas, default=None)
