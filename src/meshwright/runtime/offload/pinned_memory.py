"""Host memory for tensors (`HostMemory`), files on drives (`DriveFile`), and checks that hosts have room for both.

On a machine with CUDA, host memory is pinned if a GPU copies from it or to it. Other host memory is mapped (mmap), so
that its pages return to the system, and torch's allocator does not count it: if the device is a CPU, the allocator's
bytes are the device memory. It starts at a page boundary, as direct reads and writes of drives need.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections import defaultdict
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from meshwright.cost.memory import Backend
from meshwright.host import Host
from meshwright.host.memory_limits import Drive, find_drive, find_memory
from meshwright.program import HostNeeds, count_host_needs, lower_plan
from meshwright.spec import Graph, Plan, RunError, format_bytes
from meshwright.spec.files import make_folder

FOLDER_ADVICE = "Give a folder on a drive with enough room: --offload-folder, or prepare(..., offload_folder=...)."


def choose_folder(given: Path | str | None) -> Path:
    """Return the folder for optimizer states on drives: ``given``, or the folder of temporary files."""
    return Path(given) if given is not None else Path(tempfile.gettempdir())


def check_folder(folder: Path) -> None:
    """Create the folder for optimizer states if it does not exist. Raises RunError if that fails."""
    try:
        make_folder(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: this folder cannot hold optimizer states ({error.strerror or error}). {FOLDER_ADVICE}"
        ) from None


def check_host(plan: Plan, graph: Graph, folder: Path, device: Backend) -> None:
    """Raise RunError if this host lacks memory or drive space for the offload of all ranks of a plan."""
    local, lowered = lower_plan(plan, graph)
    every = [count_host_needs(local, lowered, rank, device) for rank in range(local.num_ranks)]
    host_bytes = plan.sharding.width * sum(needs.host_bytes for needs in every)
    drive_bytes = plan.sharding.width * sum(needs.drive_bytes for needs in every)
    host = Host()
    drive = _drive(host, folder) if drive_bytes else None
    _check(host.name, host_bytes, drive_bytes, find_memory(host).available_bytes, drive, folder)


def check_room(needs: HostNeeds, folder: Path | None) -> None:
    """Raise RunError on all processes if any host lacks room for the offload of its processes.

    ``needs``: bytes of this process. Resident tensors are allocated already, and not counted. All processes call it
    together.
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
    """Return a warning if the files of a folder are in memory (tmpfs); "" for other folders."""
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
            f"The plan needs {format_bytes(host_bytes)} more memory on host {name}{away}; "
            f"{format_bytes(memory)} are available there. "
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


# Tensors in one buffer start at multiples of a cache line.
ALIGNMENT = 64


class HostMemory:
    """Allocates host memory for the copies of one device; ``num_bytes`` counts the bytes in use."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self.num_bytes = 0

    def new(self, num_bytes: int, *, copied: bool = False) -> HostBuffer:
        """Return a new buffer. ``copied``: the device copies from or to it, so it is pinned on a machine with CUDA."""
        self.num_bytes += num_bytes
        return HostBuffer(num_bytes, pin=copied and self._pins)

    def free(self, buffer: HostBuffer) -> None:
        """Stop counting a buffer; its memory is freed with the last tensor in it."""
        self.num_bytes -= buffer.num_bytes

    def empty(self, size: int, dtype: torch.dtype, *, copied: bool = False) -> torch.Tensor:
        """Return a flat, uninitialised tensor of ``size`` elements in host memory."""
        return self.new(size * dtype.itemsize, copied=copied).view(0, (size,), dtype)

    def moved(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in host memory."""
        return self.empty(value.numel(), value.dtype).view(value.shape).copy_(value)


class HostBuffer:
    """A buffer of ``num_bytes`` in host memory: pinned, mapped, or over ``memory`` if given.

    A mapped buffer is a whole number of pages long, as direct reads and writes of files need.
    """

    def __init__(self, num_bytes: int, *, pin: bool = False, memory: mmap.mmap | None = None) -> None:
        self.memory, self.num_bytes = memory, num_bytes
        if memory is not None:
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        elif detect_fake_mode() is not None or not num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        elif pin:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.memory = mmap.mmap(-1, round_up(num_bytes, mmap.PAGESIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)[:num_bytes]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the buffer that starts ``offset`` bytes after its begin."""
        return self._bytes[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple


# The unit of direct reads and writes: the size of a page, which is a multiple of the blocks of drives.
PAGE_BYTES = mmap.PAGESIZE


# For states that are read and written piece by piece. The file has no name: its space is freed however the process
# ends, also by a kill. Reads and writes bypass the system's cache (``O_DIRECT``) if the file system supports it, in
# whole pages; otherwise they use it. Its space is allocated before the first step, so that a full drive is noticed
# then.
class DriveFile:
    """A file without a name in a folder, with ``num_bytes`` allocated. Raises RunError if it cannot be created.

    ``is_direct``: reads and writes bypass the system's cache.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self._end = folder, 0
        self.num_bytes = round_up(num_bytes, PAGE_BYTES)
        check_folder(folder)
        self._file, self.is_direct = _open_nameless(folder)
        self._take_room(self.num_bytes)

    def reserve(self, num_bytes: int) -> int:
        """Reserve ``num_bytes``, rounded up to whole pages; return their offset in bytes.

        Raises RunError if the drive has no room.
        """
        start, self._end = self._end, self._end + round_up(num_bytes, PAGE_BYTES)
        if self._end > self.num_bytes:
            # An optimizer with more states than the plan assumes.
            self._take_room(self._end)
            self.num_bytes = self._end
        return start

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` from the file, starting at byte ``start``. Raises RunError if the file is too short."""
        done = 0
        while done < len(into):
            count = os.preadv(self._file, [into[done:]], start + done)
            if not count:
                raise RunError(
                    f"{self.folder}: the file of optimizer states is shorter than expected. Start the run again."
                )
            done += count

    def write(self, start: int, values: memoryview) -> None:
        """Write ``values`` to the file, starting at byte ``start``. Raises RunError if the write fails."""
        done = 0
        try:
            while done < len(values):
                done += os.pwritev(self._file, [values[done:]], start + done)
        except OSError as error:
            raise RunError(
                f"{self.folder}: optimizer states cannot be written to this folder "
                f"({error.strerror or error}). {FOLDER_ADVICE}"
            ) from None

    def map(self, start: int, num_bytes: int) -> HostBuffer:
        """Return ``num_bytes`` of the file as mapped memory, which is read on access."""
        return HostBuffer(num_bytes, memory=mmap.mmap(self._file, num_bytes, offset=start))

    def close(self) -> None:
        """Close the file, which frees its space."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take_room(self, num_bytes: int) -> None:
        if not num_bytes:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return
            self.close()
            raise RunError(
                f"{self.folder}: this folder has no room for {format_bytes(num_bytes)} of optimizer states "
                f"({error.strerror or error}). {FOLDER_ADVICE}"
            ) from None


def _open_nameless(folder: Path) -> tuple[int, bool]:
    """A new file without a name, and whether it bypasses the cache."""
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            if hasattr(os, "O_TMPFILE"):
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    file, name = tempfile.mkstemp(dir=folder, prefix=".offload-")
    Path(name).unlink()
    return file, False
