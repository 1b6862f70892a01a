"""Whether the hosts of a run have room for what is kept there, before anything is: memory, and drives."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from meshwright.host.host import Host
from meshwright.host.memory import find_memory
from meshwright.program import HostNeeds
from meshwright.spec.errors import RunError
from meshwright.spec.units import format_bytes


def check_room(needs: HostNeeds, folder: Path | None) -> None:
    """Raise RunError on all processes if one's host lacks room, for all of its processes. All call it together.

    What is resident has been taken by now, and is not asked for again.
    """
    host = Host()
    free = find_memory(host).available_bytes
    own = (host.name, needs, free, *_drive(folder if needs.drive_bytes else None))
    found: list[tuple[str, HostNeeds, int | None, str, int | None]] = [own] * dist.get_world_size()
    if dist.get_backend() != "fake":
        dist.all_gather_object(found, own)
    in_memory, on_drives = defaultdict[str, int](int), defaultdict[tuple[str, str], int](int)
    for name, wanted, _, drive, _ in found:
        in_memory[name] += wanted.host_bytes - wanted.resident_bytes
        on_drives[name, drive] += wanted.drive_bytes
    for name, _, memory, drive, room in found:
        if memory is not None and in_memory[name] > memory:
            raise RunError(
                f"The plan takes {format_bytes(in_memory[name])} more of the memory of host {name}, which has "
                f"{format_bytes(memory)} available. Run it on more hosts, end other programs there, or plan with "
                "--offload optimizer=nvme, or with more ZeRO."
            )
        if room is not None and on_drives[name, drive] > room:
            raise RunError(
                f"The plan keeps {format_bytes(on_drives[name, drive])} of optimizer states on a drive of host {name} "
                f"({folder}), which has {format_bytes(room)} free. Choose another one: --offload-folder, or "
                "prepare(..., offload_folder=...)."
            )


def _drive(folder: Path | None) -> tuple[str, int | None]:
    """The file system of a folder by its number, and what is free there; nothing of one that cannot be asked."""
    if folder is None:
        return "", None
    try:
        _, free = Host().space(folder)
        return str(folder.stat().st_dev), free
    except OSError:
        return "", None
