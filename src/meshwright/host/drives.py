"""The file system of a folder: a drive, or memory that is mounted as one.

/proc/self/mountinfo has a line per mount: number, parent, device, root, mount point, options, optional fields, "-",
type, source, options (proc(5)); blanks in paths are written as octal numbers. Later mounts hide earlier ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from meshwright.host.host import Host

# File systems whose files are in memory (kernel.org: tmpfs.rst, ramfs-rootfs-initramfs.rst, hugetlbpage.rst).
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A mounted file system: its type, empty if unknown, and its free bytes."""

    kind: str
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """Whether files there take host memory."""
        return self.kind in _IN_MEMORY


def find_drive(host: Host, folder: Path) -> Drive:
    """The file system of a folder of this machine. Raises OSError if it cannot be read."""
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
