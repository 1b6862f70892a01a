"""Time optimizer steps on a device, by the size of the tensors: torch's loop, over many at once, and fused.

    seconds    of the device, after a kernel that waits while the host issues the step
    issue_s    of the host

And time copies of gradients into a bucket, tensor by tensor. The number of tensors of one size is such that they exceed
the cache of every GPU, but a loop of all operations of an update fits the queue of a device (some 1,000 launches).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.measurement.device_clock import DeviceClock
from meshwright.spec import EventSink, NullSink, OptimizerMeasurement
from meshwright.spec.measurements import BUCKET_COPY

SIZES = (2**8, 2**12, 2**16, 2**20, 2**22, 2**24)
_TOTAL_ELEMENTS, _MOST_TENSORS = 2**26, 96
# Kind of each row, torch's class and its options.
_KINDS: tuple[tuple[str, Any, dict[str, Any]], ...] = tuple(
    (f"{name}{suffix}", of_torch, {**options, **loop})
    for name, of_torch, options in (
        ("adamw", torch.optim.AdamW, {"lr": 1e-4}),
        ("sgd", torch.optim.SGD, {"lr": 1e-4}),
        ("sgd+momentum", torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    )
    for suffix, loop in (("", {"foreach": False}), (".foreach", {"foreach": True}), (".fused", {"fused": True}))
)


def measure_device_optimizers(
    clock: DeviceClock,
    *,
    states: Sequence[str],
    gradients: Sequence[str],
    sizes: Sequence[int] = SIZES,
    events: EventSink | None = None,
) -> tuple[OptimizerMeasurement, ...]:
    """Steps over parameters of each of the types ``states``, and copies of gradients of the types ``gradients``."""
    sink, rows = events or NullSink(), []
    for done, size in enumerate(sizes):
        for dtype in states:
            parameters = _parameters(size, dtype, clock.device)
            for kind, of_torch, options in _KINDS:
                optimizer = of_torch(parameters, **options)
                taken = clock.step(optimizer.step)
                rows.append(_row(kind, parameters, taken.seconds, taken.issue_s))
                del optimizer
            del parameters
        for dtype in gradients:
            parameters = _parameters(size, dtype, clock.device)
            bucket = [torch.zeros_like(parameter) for parameter in parameters]

            def fill(bucket: list[torch.Tensor] = bucket, parameters: list[torch.Tensor] = parameters) -> None:
                for view, parameter in zip(bucket, parameters, strict=True):
                    assert parameter.grad is not None
                    view.copy_(parameter.grad)

            rows.append(_row(BUCKET_COPY, parameters, clock.time([fill]).seconds, 0.0))
            del parameters, bucket, fill
        clock.release()
        sink.progress("measure optimizers", done + 1, len(sizes))
    return tuple(rows)


def _parameters(size: int, dtype: str, device: torch.device) -> list[torch.Tensor]:
    count = max(1, min(_MOST_TENSORS, _TOTAL_ELEMENTS // size))
    made = [torch.zeros(size, dtype=getattr(torch, dtype), device=device, requires_grad=True) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return made


def _row(kind: str, parameters: list[torch.Tensor], seconds: float, issue_s: float) -> OptimizerMeasurement:
    return OptimizerMeasurement(
        kind=kind,
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        num_elements=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        seconds=seconds,
        issue_s=issue_s,
    )
