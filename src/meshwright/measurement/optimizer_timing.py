"""Measure optimizer steps, and copies of gradients into a bucket, by the size of the tensors; classify torch's errors.

A step is that of torch.optim with its default implementation, followed by clearing the gradients, as in the runtime.
There are enough tensors of each size to exceed a core's cache together, as the parameters of a model do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from meshwright.spec import EventSink, NullSink, Optimizer, OptimizerMeasurement
from meshwright.spec.measurements import BUCKET_COPY

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
    """Return whether this error of torch leaves the device unusable for the process."""
    return any(words in str(error) for words in _FATAL)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that an allocation failed, on a GPU or in host memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


DEFAULT_SIZES = (2**8, 2**12, 2**16, 2**20, 2**22)
# Elements per measurement: 16 MiB of float32 parameters, several times a core's second-level cache (2 MiB here).
_TOTAL_ELEMENTS = 2**22
_MAX_TENSORS = 256


def measure_optimizers(
    optimizers: Sequence[Optimizer],
    *,
    dtype: str = "float32",
    sizes: Sequence[int] = DEFAULT_SIZES,
    repeats: int = 10,
    before_repeat: Callable[[], None] = lambda: None,
    events: EventSink | None = None,
) -> tuple[OptimizerMeasurement, ...]:
    """Return median seconds of each optimizer's step and of copying gradients into a bucket, for each tensor size.

    ``sizes``: elements of a tensor. ``before_repeat``: called before each repetition, such as a barrier.
    """
    sink = events or NullSink()
    rows = []
    for done, size in enumerate(sizes):
        parameters = _parameters(size, dtype)
        for optimizer in optimizers:
            update = make_optimizer(optimizer, parameters)

            def step(update: torch.optim.Optimizer = update) -> None:
                update.step()
                update.zero_grad()

            rows.append(_row(optimizer.name, parameters, step, repeats, before_repeat))
        bucket = [torch.zeros_like(parameter) for parameter in parameters]

        def fill(bucket: list[torch.Tensor] = bucket, parameters: list[torch.Tensor] = parameters) -> None:
            for view, parameter in zip(bucket, parameters, strict=True):
                assert parameter.grad is not None
                view.copy_(parameter.grad)

        rows.append(_row(BUCKET_COPY, parameters, fill, repeats, before_repeat))
        sink.progress("measure optimizers", done + 1, len(sizes))
    return tuple(rows)


def make_optimizer(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return a torch.optim optimizer of the kind of an `Optimizer`, with torch's default implementation."""
    if optimizer.kind == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9 if optimizer.momentum else 0.0)


def _parameters(size: int, dtype: str) -> list[torch.Tensor]:
    count = max(1, min(_MAX_TENSORS, _TOTAL_ELEMENTS // size))
    return [torch.randn(size, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(count)]


def _row(
    name: str,
    parameters: list[torch.Tensor],
    action: Callable[[], None],
    repeats: int,
    before_repeat: Callable[[], None],
) -> OptimizerMeasurement:
    samples = []
    for repeat in range(repeats + 1):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        before_repeat()
        start = time.perf_counter_ns()
        action()
        if repeat:  # the first step creates the states
            samples.append((time.perf_counter_ns() - start) / 1e9)
    return OptimizerMeasurement(
        kind=name,
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        num_elements=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        seconds=statistics.median(samples),
    )
