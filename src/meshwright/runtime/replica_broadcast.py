"""Broadcasts: all processes start with equal weights, and replicas start each step with equal buffers.

As in DistributedDataParallel: process 0 broadcasts its weights and buffers before the first step, and the first replica
of a stage broadcasts, before every step, the buffers that the stage's ops write (running statistics). Tensors whose
checksums agree on all processes are not sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.capture import Captured

# The size of DistributedDataParallel's first broadcast; larger ones gain nothing.
_PIECE_BYTES = 250 * 2**20


def begin_alike(captured: Captured, device: torch.device) -> None:
    """Broadcast the weights and buffers of process 0 that differ on other processes. All processes call it together."""
    if dist.get_backend() == "fake":
        return
    graph = captured.graph
    names = [item.name for item in graph.tensors if item.role in ("parameter", "buffer")]
    tensors = [captured.trace.attribute(name).detach() for name in names]
    sums = torch.tensor([_checksum(item) for item in tensors], dtype=torch.int64, device=device)
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    different = [item for item, is_alike in zip(tensors, (least == most).tolist(), strict=True) if not is_alike]
    _tell(different, 0, None, device)


class BufferSync:
    """Before a step, broadcasts the buffers of each replicated stage from its first replica.

    ``told``: for each stage, its buffers, the process number of its first replica, and the group of its replicas.
    """

    def __init__(self, told: Sequence[tuple[Sequence[torch.Tensor], int, dist.ProcessGroup]]) -> None:
        self._told = [item for item in told if item[0]]

    def __call__(self) -> None:
        """Broadcast the buffers. All replicas call it together."""
        for buffers, first, group in self._told:
            _tell(buffers, first, group, buffers[0].device)


def written_buffers(captured: Captured) -> frozenset[int]:
    """Return the tensor ids of the buffers that an op of the model writes, such as running statistics."""
    table = captured.table
    memory = {i: row.slot.storage if row.slot.storage >= 0 else -2 - i for i, row in enumerate(table.tensors)}
    written = {memory[i] for row in table.ops for i in row.written}
    return frozenset(i for i, row in enumerate(table.tensors) if row.role == "buffer" and memory[i] in written)


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def _tell(tensors: Sequence[torch.Tensor], first: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Broadcast tensors, those of one type together."""
    piece: list[torch.Tensor] = []
    for item in (*sorted(tensors, key=lambda tensor: str(tensor.dtype)), None):
        full = sum(other.nbytes for other in piece) >= _PIECE_BYTES
        if piece and (item is None or full or item.dtype != piece[0].dtype):
            flat = torch.cat([other.to(device).reshape(-1) for other in piece])
            dist.broadcast(flat, first, group=group)
            for other, value in zip(piece, flat.split([other.numel() for other in piece]), strict=True):
                other.copy_(value.view(other.shape))
            piece = []
        if item is not None:
            piece.append(item)
