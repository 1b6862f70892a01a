"""Find the memory, shared memory and disk space that this process may use (`find_memory`, `check_memory`).

available = min(MemAvailable, limit − (usage − inactive_file) of the process's cgroup and those above it): a cgroup's
usage counts cached files, which the kernel drops when memory is needed. `find_drive` finds the file system of a
folder. Sources: proc(5) for /proc/meminfo;
Documentation/admin-guide/cgroup-v2.rst (``memory.max``, ``memory.current``, ``memory.stat``) and cgroup-v1/memory.rst
(``memory.limit_in_bytes``, ``memory.usage_in_bytes``).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from meshwright.host.findings import Finding
from meshwright.host.host import Host
from meshwright.spec import format_bytes

_TOP = "/sys/fs/cgroup"


# ``/proc/self/cgroup`` has a line ``id:controllers:path`` per hierarchy: no controllers for version 2, their names for
# version 1. A limit of a folder applies to everything below it, so the folders from the process's own up to the top
# count. Inside a container the path may be that of the host, where only the top exists. Source: cgroups(7).
def cgroup_folders(host: Host, controller: str) -> list[str]:
    """Return the cgroup folders whose limits apply to this process, its own first.

    ``controller`` is "cpu" or "memory" for cgroup version 1, and "" for version 2.
    """
    folders: list[str] = []
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        tops = [f"{_TOP}/{controllers}", f"{_TOP}/{controller}"] if controller else [_TOP, f"{_TOP}/unified"]
        inner = PurePosixPath("/", path.strip())
        for top in dict.fromkeys(tops):
            # "/" is its own parent, so the top itself comes last.
            folders += [f"{top}{place}".rstrip("/") for place in (inner, *inner.parents)]
    return list(dict.fromkeys(folders))


# File systems whose files are in memory (kernel.org: tmpfs.rst, ramfs-rootfs-initramfs.rst, hugetlbpage.rst).
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A mounted file system, on a drive or in memory. ``kind`` is its type, such as ``ext4``; empty if unknown."""

    kind: str
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """Whether the files of this file system are in host memory, as in tmpfs."""
        return self.kind in _IN_MEMORY


# /proc/self/mountinfo has a line per mount: number, parent, device, root, mount point, options, optional fields, "-",
# type, source, options (proc(5)); blanks in paths are written as octal numbers. Later mounts hide earlier ones.
def find_drive(host: Host, folder: Path) -> Drive:
    """Return the file system of a folder of this machine. Raises OSError if it cannot be read."""
    _, free = host.space(folder)
    return Drive(kind=_mount_type(host, folder.resolve()), free_bytes=free)


def _mount_type(host: Host, folder: Path) -> str:
    """The type of the innermost mount above a folder; empty if the system does not report it."""
    depth, found = -1, ""
    for line in (host.read("/proc/self/mountinfo") or "").splitlines():
        mount, dash, rest = line.partition(" - ")
        fields, kinds = mount.split(" "), rest.split(" ")
        if not dash or len(fields) < 6:
            continue
        point = PurePath(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if folder.is_relative_to(point) and len(point.parts) >= depth:
            depth, found = len(point.parts), kinds[0]
    return found


# cgroup version 1 writes the largest multiple of a page below 2^63 for "no limit".
_NO_LIMIT_BYTES = 2**60
# A process that has imported torch 2.13 (CPU) and done nothing holds 218 MiB (VmRSS, measured 2026-11-21); two ranks
# are the least that a pipeline needs.
_FEW_BYTES = 2 * 218 * 2**20
_LITTLE_BYTES = 2 * 2**30
# Docker's default for --shm-size (docker run reference).
_DOCKER_SHM_BYTES = 64 * 2**20
_LITTLE_DISK_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of host memory; None if the system does not report them.

    ``limit_bytes`` is the smallest limit of the cgroups, None without a limit.
    """

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None


def find_memory(host: Host) -> Memory:
    """Return the host's memory, the bytes available to this process, and the cgroup's limit."""
    fields = _meminfo(host)
    total = fields.get("MemTotal") or _system_bytes("SC_PHYS_PAGES", host)
    free = [fields.get("MemAvailable") or fields.get("MemFree") or _system_bytes("SC_AVPHYS_PAGES", host)]
    limits = []
    for controller, limit_file, usage_file in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in cgroup_folders(host, controller):
            limit = host.read_number(f"{folder}/{limit_file}")
            if limit is None or limit >= _NO_LIMIT_BYTES:
                continue
            limits.append(limit)
            used = (host.read_number(f"{folder}/{usage_file}") or 0) - _cached_bytes(host, folder)
            free.append(max(0, limit - max(0, used)))
    return Memory(
        total_bytes=total,
        available_bytes=min((number for number in free if number is not None), default=None),
        limit_bytes=min(limits, default=None),
    )


def check_memory(host: Host) -> Iterator[Finding]:
    """Check host memory, the cgroup's limit, shared memory (/dev/shm) and the temporary folder."""
    found = find_memory(host)
    yield _judge_memory(found)
    if found.limit_bytes is not None and found.total_bytes is not None and found.limit_bytes < found.total_bytes:
        yield Finding(
            area="memory",
            name="cgroup limit",
            found=f"{format_bytes(found.limit_bytes)} of {format_bytes(found.total_bytes)}",
            status="note",
            remedy="A rank above the limit is killed by SIGKILL; raise it (docker --memory, MemoryMax of the unit).",
            topic="a-rank-is-killed-by-sigkill",
        )
    yield _judge_shared_memory(host)
    yield _judge_temporary_folder(host)


def _judge_memory(found: Memory) -> Finding:
    if found.available_bytes is None:
        return Finding(area="memory", name="host memory", found="not known")
    total = "" if found.total_bytes is None else f" of {format_bytes(found.total_bytes)}"
    text = f"{format_bytes(found.available_bytes)} available{total}"
    if found.available_bytes >= _LITTLE_BYTES:
        return Finding(area="memory", name="host memory", found=text)
    return Finding(
        area="memory",
        name="host memory",
        found=text,
        status="problem" if found.available_bytes < _FEW_BYTES else "note",
        remedy="End other programs, or plan with smaller microbatches and more stages.",
        topic="a-rank-is-killed-by-sigkill",
    )


def _judge_shared_memory(host: Host) -> Finding:
    name = "shared memory"
    if not host.exists("/dev/shm"):
        return Finding(area="memory", name=name, found="not known (no /dev/shm)")
    try:
        total, free = host.space(host.root / "dev/shm")
    except OSError:
        return Finding(area="memory", name=name, found="not known")
    finding = Finding(area="memory", name=name, found=f"{format_bytes(free)} free of {format_bytes(total)} in /dev/shm")
    if free > _DOCKER_SHM_BYTES:
        return finding
    remedy = "Workers of a DataLoader pass batches through it: docker run --shm-size=2g, or num_workers=0."
    return finding.amended("note", remedy, "workers-of-a-dataloader-die")


def _judge_temporary_folder(host: Host) -> Finding:
    name, topic = "temporary folder", "no-space-or-no-right-to-write"
    remedy = "Set TMPDIR to a folder with space that you may write to."
    wanted = host.environment.get("TMPDIR")
    try:
        # Python silently takes another folder if TMPDIR is unusable.
        place = Path(wanted) if wanted and _is_writable(Path(wanted)) else Path(tempfile.gettempdir())
        total, free = host.space(place)
    except OSError as error:
        found = f"no folder is writable ({error.strerror or error})"
        return Finding(area="memory", name=name, found=found, status="problem", remedy=remedy, topic=topic)
    text = f"{format_bytes(free)} free of {format_bytes(total)} in {place}"
    if wanted and place != Path(wanted):
        text += f", because TMPDIR={wanted} cannot be written to"
    elif free >= _LITTLE_DISK_BYTES:
        return Finding(area="memory", name=name, found=text)
    return Finding(area="memory", name=name, found=text, status="note", remedy=remedy, topic=topic)


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _cached_bytes(host: Host, folder: str) -> int:
    """Cached files that the kernel may drop: ``inactive_file`` of version 2, ``total_inactive_file`` of version 1."""
    fields = dict(line.split(" ", 1) for line in (host.read(f"{folder}/memory.stat") or "").splitlines() if " " in line)
    number = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
    return int(number) if number.isdigit() else 0


def _meminfo(host: Host) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    fields = {}
    for line in (host.read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def _system_bytes(pages: str, host: Host) -> int | None:
    """The C library's value, for this machine only (macOS has no /proc)."""
    if host.root != Path("/") or not hasattr(os, "sysconf"):
        return None
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
