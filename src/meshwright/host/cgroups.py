"""Where the limits of this process's cgroup are.

``/proc/self/cgroup`` has a line ``id:controllers:path`` per hierarchy: no controllers for version 2, their names for
version 1. A limit of a folder applies to everything below it, so the folders from the process's own up to the top
count. Inside a container the path may be that of the host, where only the top exists. Source: cgroups(7).
"""

from __future__ import annotations

from pathlib import PurePosixPath

from meshwright.host.host import Host

_TOP = "/sys/fs/cgroup"


def cgroup_folders(host: Host, controller: str) -> list[str]:
    """Folders whose limits bind this process, own first; ``controller`` is "" for version 2."""
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
