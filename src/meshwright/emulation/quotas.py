"""Shares of a core by cgroup quotas: a folder per rank, in version 1 or 2 of the kernel's cgroups.

A process may use ``share`` times a period of processor time per period. Sources: Documentation/scheduler/sched-bwc.rst
(a quota is at least 1 ms, a period 1 ms to 1 s), admin-guide/cgroup-v2.rst (``cpu.max``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.emulation.janitor import PREFIX, remove_groups
from meshwright.host import Host
from meshwright.host.memory_limits import cgroup_folders
from meshwright.spec import RunError

# Short, so that a rank is not stopped for long; each stop lasts at most a period.
_PERIOD_US = 5_000
_MIN_QUOTA_US = 1_000
_MAX_PERIOD_US = 1_000_000


@dataclass(frozen=True, slots=True)
class CpuGroups:
    """Folders below ``top``, one per rank, whose processes get a share of a core. ``version``: 1 or 2."""

    top: Path
    version: int
    name: str

    @property
    def folder(self) -> Path:
        """The folder of the whole lab."""
        return self.top / self.name

    def rank_folder(self, rank: int) -> Path:
        """Return the folder of a rank."""
        return self.folder / f"rank{rank}"

    def make(self, num_ranks: int) -> None:
        """Create the folders, without a limit yet. Raises RunError if the kernel refuses."""
        try:
            self.folder.mkdir()
            if self.version == 2:
                for folder in (self.top, self.folder):
                    (folder / "cgroup.subtree_control").write_text("+cpu")
            for rank in range(num_ranks):
                self.rank_folder(rank).mkdir()
        except OSError as error:
            raise RunError(
                f"{self.folder}: processor time cannot be limited there ({error.strerror}). Run as root, outside of a "
                "container that mounts cgroups for reading only."
            ) from None

    def limit(self, rank: int, share: float) -> None:
        """Let all processes of a rank use this share of a core together."""
        folder = self.rank_folder(rank)
        period = min(_MAX_PERIOD_US, max(_PERIOD_US, round(_MIN_QUOTA_US / share)))
        quota = max(_MIN_QUOTA_US, round(period * share))
        if self.version == 2:
            (folder / "cpu.max").write_text(f"{quota} {period}")
            return
        # A quota above the new period is allowed, one below 1 ms is not: the order does not matter.
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))

    def remove(self) -> None:
        """End all processes in the folders and remove these. Raises RunError if a process does not end."""
        remove_groups(self.folder)
        if self.folder.exists():
            raise RunError(f"{self.folder}: a process in this cgroup does not end. End it, then remove the folder.")


def find_cpu_groups(host: Host | None = None) -> tuple[Path, int]:
    """Return the top folder of the kernel's groups for processor time, and their version, 1 or 2.

    Raises RunError if ``host``, by default this one, has no such groups.
    """
    host = host or Host()
    for controller, version, file in (("cpu", 1, "cgroup.procs"), ("", 2, "cgroup.controllers")):
        # The top comes last.
        for folder in reversed(cgroup_folders(host, controller)):
            text = host.read(f"{folder}/{file}")
            if text is not None and (version == 1 or "cpu" in text.split()):
                return Path(folder), version
    raise RunError(
        "Processor time cannot be limited here: no cgroup controller 'cpu' is mounted. Mount cgroups, or leave "
        "--emulate out."
    )


def group_name(launcher: int) -> str:
    """Return the folder name for the lab of a launcher: its process number and the moment at which it started."""
    return f"{PREFIX}{launcher}-{start_time(launcher)}"


def start_time(process: int) -> int:
    """Return when a process started, in clock ticks since boot (field 22 of /proc/PID/stat); 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def sweep(top: Path) -> None:
    """Remove the folders of launchers that have ended, with whatever still runs in them."""
    for folder in top.glob(f"{PREFIX}*"):
        process, _, started = folder.name.removeprefix(PREFIX).partition("-")
        if process.isdecimal() and start_time(int(process)) != int(started or 0) and folder.is_dir():
            remove_groups(folder)
