"""Functions whose names differ between versions of torch (docs/torch-versions.md)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Functions of torch.distributed; torch 2.13 deprecates their former names.
ALL_GATHER, REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def all_gather_single(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> dist.Work | None:
    """Gather the parts of all ranks of a group into one tensor."""
    work: dist.Work | None = getattr(dist, ALL_GATHER)(whole, part, **options)
    return work


def reduce_scatter_single(part: torch.Tensor, whole: torch.Tensor, **options: Any) -> dist.Work | None:
    """Sum a tensor over the ranks of a group; each rank gets its part."""
    work: dist.Work | None = getattr(dist, REDUCE_SCATTER)(part, whole, **options)
    return work
