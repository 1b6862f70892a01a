"""Host memory: the buffers of tensors on the host.

On a machine with CUDA it is pinned if a GPU copies from it or to it. Otherwise it is mapped: its pages come from the
system and return there. It is not counted by torch's allocator, whose bytes are the device memory if the device is a
processor. It starts at a page boundary, as direct reads and writes of drives need.
"""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch._guards import detect_fake_mode

# Tensors in one buffer start at multiples of a cache line.
ALIGNMENT = 64


class HostMemory:
    """Makes buffers for one device, and counts their bytes."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self.num_bytes = 0

    def new(self, num_bytes: int, *, copied: bool = False) -> HostBuffer:
        """A buffer; ``copied``: the device copies from and to it."""
        self.num_bytes += num_bytes
        return HostBuffer(num_bytes, pin=copied and self._pins)

    def free(self, buffer: HostBuffer) -> None:
        """Stop counting a buffer; its memory is freed with the last tensor in it."""
        self.num_bytes -= buffer.num_bytes

    def empty(self, size: int, dtype: torch.dtype, *, copied: bool = False) -> torch.Tensor:
        """A flat tensor of ``size`` elements."""
        return self.new(size * dtype.itemsize, copied=copied).view(0, (size,), dtype)

    def moved(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor."""
        return self.empty(value.numel(), value.dtype).view(value.shape).copy_(value)


class HostBuffer:
    """A buffer of ``num_bytes``, over ``memory`` if given; files are read and written with it in whole pages."""

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
        """A tensor in the buffer, starting at an offset."""
        return self._bytes[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
