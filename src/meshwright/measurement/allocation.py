"""Was memory what was lacking? Torch says it in several ways."""

from __future__ import annotations

import torch

# Torch's allocator for processors has no error of its own (c10/core/impl/alloc_cpu.cpp), nor have NVIDIA's libraries,
# which allocate for themselves (CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED).
_WORDS = ("can't allocate memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or in host memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)
