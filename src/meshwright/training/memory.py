"""Peak memory of a rank in training: what the platform counts from the moment when everything is prepared.

On a CUDA device the allocator counts. On a CPU under Linux it is the growth of the process's resident set (its
high-water mark is reset first) plus the size of the stage's parameters: the interpreter, its libraries and the memory
of the capture are left out, and memory that the C library kept from them for reuse is not seen, so the figure can be
somewhat low.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from meshwright.runtime import ProcessPeak

_STATUS = Path("/proc/self/status")
# Writing 5 here resets the high-water mark of the resident set (Linux, proc(5), clear_refs).
_CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Counts from its creation on; ``resident`` are existing tensors that belong to training.

    ``beside()`` returns the bytes of offloaded tensors, which are part of a process's growth on processors, too.
    """

    def __init__(
        self, device: torch.device, resident: Iterable[torch.Tensor], beside: Callable[[], int] = lambda: 0
    ) -> None:
        self._device = device
        self._resident_bytes = sum(tensor.numel() * tensor.element_size() for tensor in resident)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                _CLEAR_REFS.write_text("5")
        self._start_bytes, self._beside = _read_status("VmRSS"), beside
        self._beside_bytes = beside()

    def peak(self) -> ProcessPeak:
        """The peak of training so far; 0 if the platform does not report it."""
        if self._device.type == "cuda":
            in_use, reserved = (
                read(self._device) for read in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            )
            return ProcessPeak(in_use, reserved)
        peak = _read_status("VmHWM")
        peak -= min(self._beside() - self._beside_bytes, peak)
        return ProcessPeak(max(peak - self._start_bytes, 0) + self._resident_bytes if peak else 0, 0)


def _read_status(field: str) -> int:
    """A size of this process in bytes; 0 if the platform has no such file."""
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
