"""Classify errors of torch on a device: memory was lacking, or the device is unusable."""

from __future__ import annotations

import torch

# torch's allocator for processors has no error of its own (c10/core/impl/alloc_cpu.cpp), nor have NVIDIA's libraries,
# which allocate for themselves (CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED).
_WORDS = ("can't allocate memory", "STATUS_ALLOC_FAILED")


# Permanent errors of CUDA: every later call fails, too (cudaError_t in the CUDA runtime API).
_FATAL = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "ECC error",
    "hardware stack error",
)


def is_fatal(error: BaseException) -> bool:
    """Whether a device is unusable for this process from now on."""
    return any(words in str(error) for words in _FATAL)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or in host memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)
