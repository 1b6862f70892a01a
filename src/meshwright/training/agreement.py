"""Do all ranks read the same batches?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from meshwright.spec.errors import RunError


def check_same_batch(tensors: Iterable[torch.Tensor]) -> None:
    """Raise RunError unless all ranks have the same batch."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    check_same("read another first batch than rank 0", digest.hexdigest())


def check_same(what: str, own: str) -> None:
    """Raise RunError unless all ranks say the same."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    different = [rank for rank, other in enumerate(gathered) if other != gathered[0]]
    if different:
        raise RunError(
            f"Ranks {', '.join(map(str, different))} {what}. Every rank must read the "
            "same global batches: seed the shuffling alike on all ranks (torch.manual_seed, or DataLoader's generator) "
            "and use no DistributedSampler."
        )
