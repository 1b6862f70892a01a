"""A lab: a cluster's network and processors built on this machine, changed at given times, and removed.

The caller opens a lab (`open_lab`), starts a process for each rank by ``python`` and `Lab.arguments`, and calls
`Lab.start_clock` with the first step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshwright.emulation import janitor
from meshwright.emulation.layout import LabLayout, plan_layout, rank_shares
from meshwright.emulation.namespaces import new_namespace, run_inside
from meshwright.emulation.quotas import CpuGroups, find_cpu_groups, group_name, sweep
from meshwright.host import Host
from meshwright.host.memory_limits import find_memory
from meshwright.simulator.scenarios import change_machines
from meshwright.spec import Cluster, ClusterError, RunError, ScenarioError, format_bytes, format_count
from meshwright.spec.scenario import NetworkCards, Oversubscription, Scenario, SlowDevice, SlowLink

# A rank with torch loaded, and a small model: VmHWM of /proc/self/status is 401 MiB after `import meshwright.training`
# and `load_model("gpt-tiny")`.
_RANK_BYTES = 400 * 2**20
_JANITOR_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """What to emulate: a cluster in a scenario, whose times count from the first step, and the device of each rank.

    Raises ScenarioError for effects other than those on speeds, links, NICs and racks, or on parts that the cluster
    lacks; ClusterError for devices that it lacks.
    """

    cluster: Cluster
    devices: tuple[int, ...]
    scenario: Scenario = Scenario()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        for place, effect in enumerate(self.scenario.effects):
            if not isinstance(effect, SlowDevice | SlowLink | NetworkCards | Oversubscription):
                raise ScenarioError(
                    f"{self.scenario.origin(place)}: an effect of kind {effect.KIND!r} cannot be emulated; expected "
                    "slow-device, slow-link, network-cards or oversubscription. Leave it out, or simulate it."
                )
        if max(self.devices) >= self.cluster.num_ranks:
            raise ClusterError(
                f"The plan uses device {max(self.devices)}, and the emulated cluster {self.cluster.name!r} has "
                f"{format_count(self.cluster.num_ranks, 'device')}. Emulate a cluster with all devices of the plan."
            )
        self.states()

    def states(self) -> list[tuple[float, Cluster]]:
        """Return pairs of seconds since the first step, ascending from 0, and the cluster from then on."""
        return [(at_s, change_machines(self.cluster, self.scenario, at_s)[0]) for at_s in self.scenario.moments()]


class Lab:
    """A cluster that stands, and the clock of its changes.

    ``arguments``: of Python, to start a module as a rank inside of it. ``enter``: a function that moves the process
    that calls it there, with the rank as its argument; it can be pickled.
    """

    def __init__(self, emulated: Emulated, namespaces: list[int], groups: CpuGroups, file: Path) -> None:
        self._emulated, self._namespaces, self._groups = emulated, namespaces, groups
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.arguments = ("-m", "meshwright.emulation.enter", str(file))
        self.enter = partial(_enter, str(file))

    def start_clock(self) -> None:
        """Limit processor time from now on, and apply the later states at their moments. Further calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()

    def stop_clock(self) -> None:
        """Apply no further states."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def check_clock(self) -> None:
        """Raise RunError if a state could not be applied."""
        if self._error is not None:
            raise RunError(f"The emulated cluster could not be changed during the run: {self._error}")

    def _limit(self, cluster: Cluster) -> None:
        shares = rank_shares(cluster, num_cores_here())
        for rank, device in enumerate(self._emulated.devices):
            self._groups.limit(rank, shares[device])

    def _follow(self) -> None:
        before = 0.0
        for moment, cluster in self._emulated.states():
            if self._stop.wait(moment - before):
                return
            before = moment
            try:
                if moment:
                    set_queues(plan_layout(cluster), self._namespaces)
                self._limit(cluster)
            except (OSError, RunError, subprocess.SubprocessError) as error:
                self._error = error
                return


def check_emulation(emulated: Emulated) -> None:
    """Raise RunError or ClusterError if this machine cannot emulate a cluster: rights, programs, memory, links."""
    if sys.platform != "linux":
        raise RunError("--emulate needs network namespaces of Linux. Run on Linux, or leave --emulate out.")
    if os.geteuid() != 0:
        raise RunError("--emulate makes network namespaces and cgroups, which needs root. Run it as root (sudo).")
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise RunError(f"--emulate needs {' and '.join(missing)}. Install iproute2.")
    find_cpu_groups()
    clusters = [cluster for _, cluster in emulated.states()]
    layouts = [plan_layout(cluster) for cluster in clusters]
    if any(_shape(layout) != _shape(layouts[0]) for layout in layouts):
        raise ClusterError(
            "The scenario changes the number of nodes, NICs or racks during the run; an emulated network keeps them. "
            "Change bandwidths or speeds instead."
        )
    for cluster in clusters:
        rank_shares(cluster, num_cores_here())
    num_ranks, available = len(emulated.devices), find_memory(Host()).available_bytes
    if available is not None and num_ranks * _RANK_BYTES > available:
        raise ClusterError(
            f"{format_count(num_ranks, 'rank')} need about {format_bytes(num_ranks * _RANK_BYTES)} of memory here, and "
            f"{format_bytes(available)} are available. Emulate fewer devices."
        )


@contextlib.contextmanager
def open_lab(emulated: Emulated, folder: Path) -> Iterator[Lab]:
    """Build a cluster, and remove it at the end; ``folder`` takes the file that its ranks read.

    Raises the errors of `check_emulation`. Everything is removed also if this process is killed.
    """
    check_emulation(emulated)
    top, version = find_cpu_groups()
    sweep(top)
    groups = CpuGroups(top, version, group_name(os.getpid()))
    layout, namespaces = plan_layout(emulated.states()[0][1]), list[int]()
    with contextlib.ExitStack() as stack:
        stack.callback(groups.remove)  # if the janitor was killed
        stack.enter_context(_janitor(groups.folder))
        groups.make(len(emulated.devices))
        for _ in range(len(layout.nics) + 1):
            namespaces.append(new_namespace())
            stack.callback(os.close, namespaces[-1])
        files = [f"/proc/{os.getpid()}/fd/{file}" for file in namespaces]
        run_inside(namespaces[-1], "ip", layout.switch_links(files[:-1]))
        for place in range(len(layout.nics)):
            run_inside(namespaces[place], "ip", layout.nic_links(place, files))
        set_queues(layout, namespaces)
        nics = [layout.nic_of_rank[device] for device in emulated.devices]
        data = {
            "namespaces": [files[nic] for nic in nics],
            "groups": [str(groups.rank_folder(rank) / "cgroup.procs") for rank in range(len(nics))],
            "store": layout.nics[nics[0]].address,
        }
        file = folder / "lab.json"
        file.write_text(json.dumps(data), encoding="utf-8")
        lab = Lab(emulated, namespaces, groups, file)
        stack.callback(lab.stop_clock)
        yield lab
        lab.check_clock()


def set_queues(layout: LabLayout, namespaces: list[int]) -> None:
    """Set the rates of all links; ``namespaces`` are those of the NICs, then the switch."""
    run_inside(namespaces[-1], "tc", layout.switch_queues())
    for place in range(len(layout.nics)):
        run_inside(namespaces[place], "tc", layout.nic_queues(place))


@contextlib.contextmanager
def _janitor(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-S", janitor.__file__, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(_JANITOR_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _enter(file: str, rank: int) -> None:
    # Imported with this package, the module could not be run without a warning (runpy).
    from meshwright.emulation.enter import enter  # noqa: PLC0415

    enter(file, rank)


def num_cores_here() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _shape(layout: LabLayout) -> tuple[object, ...]:
    return [(nic.node, nic.place, nic.rack) for nic in layout.nics], layout.nic_of_rank, layout.num_racks
