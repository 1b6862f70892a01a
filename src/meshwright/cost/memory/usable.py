"""The memory of a device that the allocator of a rank may reserve.

    usable = (memory − context − NCCL) / (1 + margin)

The context and the buffers of NCCL are outside of torch's allocator; a single device does not use NCCL, but the room is
reserved, so that its plan fits into a larger cluster. The margin covers the error of the memory model: at least the 90
% quantile of (reserved - predicted) / predicted over the training steps of ``validation/data/steps_cuda.csv``;
`meshwright validate memory` shows it.

Sources: CUDA's context takes about 0.5 GiB on an H100 (driver 580, own measurement). NCCL takes about 1 GiB for a
communicator that uses all channels: each of up to 24 channels has buffers of 4 MiB (Simple), 4.7 MiB (LL128) and 0.5
MiB (LL) for every peer of its ring and its tree (NVIDIA/nccl, src/include/comm.h; 1.6 GB were reported in
https://github.com/NVIDIA/nccl/issues/864).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.memory.stage import backend_of
from meshwright.spec import format_bytes, format_percent

if TYPE_CHECKING:
    from meshwright.spec import DeviceKind

CONTEXT_BYTES = 2**29
NCCL_BYTES = 2**30
MEMORY_MARGIN = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """How much of a device a plan may use.

    ``num_bytes`` replaces the memory of every device, without what is outside of the allocator. ``margin`` is the share
    by which predictions may be too low; None stands for `MEMORY_MARGIN` on GPUs, and for 0 on CPUs and with
    ``num_bytes``.
    """

    num_bytes: int | None = None
    margin: float | None = None

    def usable_bytes(self, kind: DeviceKind) -> int:
        """Return the bytes that the allocator of a rank may reserve on a device."""
        whole = kind.memory_bytes - _outside_bytes(kind)
        room = whole if self.num_bytes is None else self.num_bytes
        return max(int(room / (1 + self.margin_on(kind))), 0)

    def margin_on(self, kind: DeviceKind) -> float:
        """Return the margin on a device kind."""
        if self.margin is not None:
            return self.margin
        return 0.0 if self.num_bytes is not None or backend_of(kind) == "cpu" else MEMORY_MARGIN

    def explain(self, kind: DeviceKind) -> str:
        """Return the parts of a device's memory that plans leave, in words; "" if plans may use all of it."""
        parts = []
        if self.num_bytes is None and backend_of(kind) == "cuda":
            parts.append(f"{format_bytes(_outside_bytes(kind))} for CUDA and NCCL")
        if margin := self.margin_on(kind):
            parts.append(f"a margin of {format_percent(margin, 0)} for the error of this prediction")
        if not parts:
            return ""
        whole = format_bytes(kind.memory_bytes if self.num_bytes is None else self.num_bytes)
        return f"Of a device's {whole}, plans leave {' and '.join(parts)}."


def _outside_bytes(kind: DeviceKind) -> int:
    return 0 if backend_of(kind) == "cpu" else CONTEXT_BYTES + NCCL_BYTES
