"""Checks before a run that its hosts have room for offloaded states: memory, and drives."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from meshwright.cost.memory import Backend
from meshwright.host.drives import Drive, find_drive
from meshwright.host.host import Host
from meshwright.host.memory import find_memory
from meshwright.program import HostNeeds, count_host_needs, lower_plan
from meshwright.spec.errors import RunError
from meshwright.spec.files import make_folder
from meshwright.spec.graph import Graph
from meshwright.spec.plan import Plan
from meshwright.spec.units import format_bytes

FOLDER_ADVICE = "Give a folder on a drive with room for them: --offload-folder, or prepare(..., offload_folder=...)."


def choose_folder(given: Path | str | None) -> Path:
    """The folder for states on drives: by default that of temporary files."""
    return Path(given) if given is not None else Path(tempfile.gettempdir())


def check_folder(folder: Path) -> None:
    """Make the folder for optimizer states, unless it exists. Raises RunError if it is not writable."""
    try:
        make_folder(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: optimizer states cannot be kept there ({error.strerror or error}). {FOLDER_ADVICE}"
        ) from None


def check_host(plan: Plan, graph: Graph, folder: Path, device: Backend) -> None:
    """Raise RunError if this host lacks room for all ranks of a plan before they start."""
    local, lowered = lower_plan(plan, graph)
    every = [count_host_needs(local, lowered, rank, device) for rank in range(local.num_ranks)]
    host_bytes = plan.sharding.width * sum(needs.host_bytes for needs in every)
    drive_bytes = plan.sharding.width * sum(needs.drive_bytes for needs in every)
    host = Host()
    drive = _drive(host, folder) if drive_bytes else None
    _check(host.name, host_bytes, drive_bytes, find_memory(host).available_bytes, drive, folder)


def check_room(needs: HostNeeds, folder: Path | None) -> None:
    """Raise RunError on all processes if the host of any lacks room for its processes. All call it together.

    Resident tensors are already allocated, and not counted again.
    """
    host = Host()
    own = (
        host.name,
        needs,
        find_memory(host).available_bytes,
        _drive(host, folder) if needs.drive_bytes and folder is not None else None,
    )
    found: list[tuple[str, HostNeeds, int | None, Drive | None]] = [own] * dist.get_world_size()
    if dist.get_backend() != "fake":
        dist.all_gather_object(found, own)
    in_memory, on_drives = defaultdict[str, int](int), defaultdict[str, int](int)
    for name, wanted, _, _ in found:
        in_memory[name] += wanted.host_bytes - wanted.resident_bytes
        on_drives[name] += wanted.drive_bytes
    for name, _, memory, drive in found:
        _check(name, in_memory[name], on_drives[name], memory, drive, folder)


def explain_memory(folder: Path) -> str:
    """A remark for the user on a folder whose files are in memory; empty for other folders."""
    drive = _drive(Host(), folder)
    if drive is None or not drive.is_memory:
        return ""
    return (
        f"{folder} is in memory ({drive.kind}), not on a drive, so that optimizer states there take host memory. "
        f"{FOLDER_ADVICE}"
    )


def _check(
    name: str, host_bytes: int, drive_bytes: int, memory: int | None, drive: Drive | None, folder: Path | None
) -> None:
    """Raise RunError for a host without this many bytes of memory, and of its drive."""
    away, fits_elsewhere = "", memory is not None and host_bytes <= memory
    if drive is not None and drive.is_memory:
        host_bytes += drive_bytes
        away = f", {format_bytes(drive_bytes)} of them in {folder}, which is in memory ({drive.kind}), not on a drive"
    if memory is not None and host_bytes > memory:
        raise RunError(
            f"The plan takes {format_bytes(host_bytes)} more of the memory of host {name}{away}; it has "
            f"{format_bytes(memory)} available. "
            + (
                FOLDER_ADVICE
                if fits_elsewhere
                else "Run it on more hosts, end other programs there, or plan with less offload (--offload)."
            )
        )
    if drive is not None and drive_bytes > drive.free_bytes:
        raise RunError(
            f"The plan keeps {format_bytes(drive_bytes)} of optimizer states on a drive of host {name} ({folder}), "
            f"which has {format_bytes(drive.free_bytes)} free. {FOLDER_ADVICE}"
        )


def _drive(host: Host, folder: Path) -> Drive | None:
    """The drive of a folder; None if it is not known."""
    try:
        return find_drive(host, folder)
    except OSError:
        return None
