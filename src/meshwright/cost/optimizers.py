"""Seconds of an optimizer step over parameters, and of copying gradients into the buckets of their reduction.

If steps were measured, the time is Σ over tensors of f(elements), where f is the curve through the measured points.
Else it is the roofline of torch's kernels, by torch's loop over the parameters:

    seconds = Σ elements · accesses · width / (share · memory bandwidth) + kernels · launch

    tensors   one after the other: every operation of the update is a kernel per tensor (CPUs)
    foreach   every operation is a kernel over all tensors, launched once per 320 chunks of 65,536 elements
    fused     one kernel reads parameters, gradients and states and writes parameters and states

The share is 1 on CPUs; on GPUs it comes from measured steps of AdamW (`cost.gpu`). `default_loop` returns the loop of
our runtime. In mixed precision the loop iterates over the float32 master weights. A gradient in bfloat16 is widened
before the step, and the parameter is narrowed after it. Copying into a bucket reads and writes each gradient once,
tensor by tensor. Source: torch 2.13, torch/optim/adam.py and sgd.py,
aten/src/ATen/native/cuda/MultiTensorApply.cuh, FusedAdamUtils.cuh.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.cost.costs import Basis, Cost, Interval, cost_of_seconds
from meshwright.cost.gpu.gpu_products import is_modelled, shipped_gpu
from meshwright.cost.gpu.launches import copied
from meshwright.cost.op_estimates import Curve, fit_curve
from meshwright.cost.roofline import LAUNCH_S
from meshwright.spec.measurements import BUCKET_COPY
from meshwright.spec.precision import Numbers, numbers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.spec import DeviceKind, Graph, Measurements, Optimizer, Tensor, Workload

# Torch's loops over the parameters in an optimizer step.
OptimizerLoop = Literal["tensors", "foreach", "fused"]

# AdamW counts its steps in one float32 per parameter tensor (torch.optim.AdamW, state "step").
STEP_COUNTER_BYTES = 4
# Arrays that each operation of an update reads and writes. _single_tensor_adam: decay mul_, lerp_, mul_, addcmul_,
# sqrt, div, add_, addcdiv_; _single_tensor_sgd: mul_, add_ of the momentum, add_ of the parameter.
_ACCESSES: dict[str, tuple[int, ...]] = {"adamw": (2, 3, 2, 3, 2, 2, 2, 4), "sgd+momentum": (2, 3, 3), "sgd": (3,)}
# In one kernel: parameters, gradients and states read, parameters and states written.
_FUSED_ACCESSES = {"adamw": 7, "sgd+momentum": 5, "sgd": 3}
# Measured / predicted of 180 steps and copies of whole models by a table of five tensor sizes, on one core shared with
# other work (scripts/check_optimizer_steps.py, torch 2.13, 2026-11-21).
MEASURED_STEP = Interval(low=0.17, high=2.41)
# The same for a GPU without other work: an assumption, as wide as that of a measured op (`op_estimates.MEASURED`).
MEASURED_ON_GPU = Interval(low=0.70, high=1.43)
# Limits of one launch of a kernel over many tensors: elements per chunk, chunks, and tensors (of four lists).
_CHUNK_ELEMENTS, _MAX_CHUNKS, _MAX_TENSORS = 65_536, 320, 36


def state_bytes(optimizer: Optimizer, precision: str) -> int:
    """Return the bytes of optimizer states and master weight per element of a parameter."""
    numbers = numbers_of(precision)
    return numbers.master_bytes + numbers.state_bytes * optimizer.num_states


def optimizer_bytes(parameter: Tensor, workload: Workload) -> int:
    """Return the bytes of a trained parameter's optimizer states and master weight, with AdamW's step counter."""
    counter = STEP_COUNTER_BYTES if workload.optimizer.kind == "adamw" else 0
    return parameter.num_elements(0) * state_bytes(workload.optimizer, workload.precision) + counter


def default_loop(optimizer: Optimizer, *, on_gpu: bool) -> OptimizerLoop:
    """Return the loop over the parameters in our runtime (`training.job.make_optimizer`).

    On GPUs it is "fused" for AdamW, else "foreach"; on CPUs "tensors". Except for AdamW on GPUs, it is torch's default.
    """
    if not on_gpu:
        return "tensors"
    return "fused" if optimizer.kind == "adamw" else "foreach"


def measured_as(optimizer: Optimizer, loop: OptimizerLoop) -> str:
    """Return the name of an optimizer and loop in a measurement table: "adamw" for "tensors", else "adamw.fused"."""
    return optimizer.name if loop == "tensors" else f"{optimizer.name}.{loop}"


def optimizer_curves(measurements: Measurements, numbers: Numbers) -> dict[str, Curve]:
    """Return measured curves by name (`measured_as`): seconds to update one tensor, by its number of elements.

    Only optimizers measured in the type of the states are included. The key `BUCKET_COPY` has the seconds to copy one
    tensor's gradient into a bucket, in the type of the gradients.
    """
    rows = [
        row
        for row in measurements.optimizers
        if row.num_tensors and row.dtype == (numbers.gradients if row.kind == BUCKET_COPY else numbers.states)
    ]
    return {
        name: fit_curve(
            (row.num_elements / row.num_tensors, row.seconds / row.num_tensors) for row in rows if row.kind == name
        )
        for name in sorted({row.kind for row in rows})
    }


def trainable_elements(graph: Graph, parameters: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of elements of each trainable parameter, shape (trainable parameters,)."""
    tensors = (graph.tensors[i] for i in parameters)
    return np.array([tensor.num_elements(0) for tensor in tensors if tensor.requires_grad], np.int64)


def estimate_step(
    elements: NDArray[np.int64],
    optimizer: Optimizer,
    kind: DeviceKind,
    precision: str,
    curve: Curve | None,
    loop: OptimizerLoop,
    unsure: Interval,
) -> Cost:
    """Return the cost of one optimizer step over tensors.

    ``elements``: number of elements of each tensor, shape (tensors,). ``curve``: measured steps of this loop
    (`optimizer_curves`), or None. ``unsure``: interval of rooflines on the device kind. On GPUs, conversions between
    gradients, master weights and parameters are added to measured steps; rooflines always include them.
    """
    conversions = _conversions(numbers_of(precision))
    if curve is not None and not is_modelled(kind):
        return _estimate_measured(elements, curve, MEASURED_STEP)
    if curve is not None:
        moved = float(elements.sum()) * sum(conversions) / kind.memory_bandwidth_bytes_per_s
        around = moved / shipped_gpu().rate("pointwise", 4).share(1) + len(conversions) * len(elements) * LAUNCH_S
        measured = _estimate_measured(elements, curve, MEASURED_ON_GPU)
        return measured.slowed((measured.seconds + around) / measured.seconds) if measured.seconds else measured
    per_element = bytes_per_element(optimizer, precision, loop)
    kernels = _num_kernels(elements, optimizer, loop) + len(conversions) * len(elements)
    bandwidth: float = kind.memory_bandwidth_bytes_per_s
    basis: Basis = "roofline"
    if is_modelled(kind):
        bandwidth *= shipped_gpu().optimizer_share(numbers_of(precision).state_bytes)
        basis, unsure = shipped_gpu().basis_on(kind)
    seconds = float(elements.sum()) * per_element / bandwidth + kernels * LAUNCH_S
    return cost_of_seconds(seconds, unsure, basis)


def bytes_per_element(optimizer: Optimizer, precision: str, loop: OptimizerLoop) -> int:
    """Return the bytes that a step reads and writes per parameter element, including conversions of mixed precision."""
    numbers = numbers_of(precision)
    return numbers.state_bytes * _num_accesses(optimizer, loop) + sum(_conversions(numbers))


def _conversions(numbers: Numbers) -> list[int]:
    """Return the bytes per element of each conversion around a step on master weights: of gradient and parameter."""
    if not numbers.master_bytes:
        return []
    widened = [numbers.gradient_bytes + numbers.master_bytes] if numbers.gradient_bytes < numbers.master_bytes else []
    return [*widened, numbers.master_bytes + numbers.value_bytes]


def estimate_copy(
    elements: NDArray[np.int64], kind: DeviceKind, precision: str, curve: Curve | None, unsure: Interval
) -> Cost:
    """Return the cost of copying gradients into a bucket, one by one; arguments as in `estimate_step`."""
    if curve is not None:
        return _estimate_measured(elements, curve, MEASURED_ON_GPU if is_modelled(kind) else MEASURED_STEP)
    width = numbers_of(precision).gradient_bytes
    if is_modelled(kind):
        gpu = shipped_gpu()
        basis, interval = gpu.basis_on(kind)
        return cost_of_seconds(
            gpu.seconds((copied(float(one), width, width) for one in elements), kind), interval, basis
        )
    seconds = 2 * float(elements.sum()) * width / kind.memory_bandwidth_bytes_per_s + LAUNCH_S * len(elements)
    return cost_of_seconds(seconds, unsure, "roofline")


def _num_accesses(optimizer: Optimizer, loop: OptimizerLoop) -> int:
    return _FUSED_ACCESSES[optimizer.name] if loop == "fused" else sum(_ACCESSES[optimizer.name])


def num_operations(optimizer: Optimizer) -> int:
    """Return the number of torch operations in which the loop "tensors" updates one tensor."""
    return len(_ACCESSES[optimizer.name])


def _num_kernels(elements: NDArray[np.int64], optimizer: Optimizer, loop: OptimizerLoop) -> int:
    """Return the number of kernels of a step; AdamW counts its steps in one more per launch."""
    operations = 1 if loop == "fused" else num_operations(optimizer)
    operations += optimizer.kind == "adamw"
    chunks = int(np.ceil(elements / _CHUNK_ELEMENTS).sum())
    starts = max(math.ceil(chunks / _MAX_CHUNKS), math.ceil(len(elements) / _MAX_TENSORS))
    return operations * (len(elements) if loop == "tensors" else starts)


def _estimate_measured(elements: NDArray[np.int64], curve: Curve, interval: Interval) -> Cost:
    seconds = float(curve.at(elements.astype(np.float64)).sum())
    inside = len(elements) == 0 or (curve.sizes[0] <= elements.min() and elements.max() <= curve.sizes[-1])
    if np.isin(elements, curve.sizes).all():
        return cost_of_seconds(seconds, interval, "measured")
    return cost_of_seconds(seconds, interval, "interpolated" if inside else "transferred")
