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
    """All-gather: write the parts of all ranks of a process group into ``whole``, in rank order.

    ``options`` are those of torch's function. Returns a handle to wait for if ``async_op`` is set, else None.
    """
    work: dist.Work | None = getattr(dist, ALL_GATHER)(whole, part, **options)
    return work


def reduce_scatter_single(part: torch.Tensor, whole: torch.Tensor, **options: Any) -> dist.Work | None:
    """Reduce-scatter: reduce ``whole`` over the ranks of a process group; each rank receives its slice in ``part``.

    ``options`` are those of torch's function, which sums by default. Returns a handle to wait for if ``async_op`` is
    set, else None.
    """
    work: dist.Work | None = getattr(dist, REDUCE_SCATTER)(part, whole, **options)
    return work
