"""Whether the hosts of a run have room for what is kept there, before anything is: memory, and drives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from meshwright.cost.optimizers import state_bytes
from meshwright.host.host import Host
from meshwright.host.memory import find_memory
from meshwright.program import PIECES_AT_HAND
from meshwright.runtime.offload.pieces import PieceFacts
from meshwright.spec.errors import RunError
from meshwright.spec.plan import Plan
from meshwright.spec.units import format_bytes


class Needs(NamedTuple):
    """Bytes that a process keeps on its host and on the drives."""

    host_bytes: int
    drive_bytes: int


def count_needs(pieces: Sequence[PieceFacts], plan: Plan) -> Needs:
    """What pieces take there, with the optimizer that the plan says (`simulator.host_memory`)."""
    numbers = plan.workload.numbers
    each = state_bytes(plan.workload.optimizer, plan.workload.precision)
    elements = sum(piece.size for piece in pieces)
    kept = numbers.gradient_bytes + (0 if numbers.master_bytes else numbers.value_bytes)
    if plan.offload.optimizer == "host":
        return Needs(elements * (kept + each), 0)
    largest = sorted((piece.size for piece in pieces), reverse=True)[:PIECES_AT_HAND]
    return Needs(elements * kept + sum(largest) * each, elements * each)


def check_room(needs: Needs, folder: Path | None) -> None:
    """Raise RunError on all processes if one's host lacks room, for all of its processes. All call it together."""
    host = Host()
    free = find_memory(host).available_bytes
    own = (host.name, needs, free, *_drive(folder if needs.drive_bytes else None))
    found: list[tuple[str, Needs, int | None, str, int | None]] = [own] * dist.get_world_size()
    if dist.get_backend() != "fake":
        dist.all_gather_object(found, own)
    in_memory, on_drives = defaultdict[str, int](int), defaultdict[tuple[str, str], int](int)
    for name, wanted, _, drive, _ in found:
        in_memory[name] += wanted.host_bytes
        on_drives[name, drive] += wanted.drive_bytes
    for name, _, memory, drive, room in found:
        if memory is not None and in_memory[name] > memory:
            raise RunError(
                f"The plan keeps {format_bytes(in_memory[name])} in the memory of host {name}, which has "
                f"{format_bytes(memory)} available. Run it on more hosts, end other programs there, or plan with less "
                "there: --offload optimizer=nvme, without activations=host, or with more ZeRO."
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
