"""How long the optimizer's step over some parameters takes.

Measured (torch's own loop over the tensors): Σ over tensors of f(elements), f through the measured points.
Else the roofline of one fused pass: it reads parameter, gradient and states, and writes parameter and states,

    seconds = Σ elements · bytes per element / memory bandwidth + one launch

Mixed precision adds a four-byte master copy that is read and written. Copying gradients into an exchange bucket reads
and writes each once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.curves import Curve, fit_curve
from meshwright.cost.roofline import LAUNCH_S
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.spec import DeviceKind, Graph, Measurements, Optimizer

# Bytes of a master weight and of an optimizer state in mixed precision (spec: Workload.precision).
MASTER_BYTES = 4
# AdamW counts its steps in one float32 per parameter tensor (torch.optim.AdamW, state "step").
STEP_COUNTER_BYTES = 4


def state_bytes(optimizer: Optimizer, dtype: str) -> int:
    """Bytes of optimizer states and master weight per parameter element."""
    if dtype == "bfloat16":
        return MASTER_BYTES * (1 + optimizer.num_states)
    return DTYPE_BYTES[dtype] * optimizer.num_states


def optimizer_curves(measurements: Measurements, dtype: str) -> dict[str, Curve]:
    """Seconds of one tensor's update by its elements, per optimizer that was measured in this dtype."""
    rows = [row for row in measurements.optimizers if row.dtype == dtype]
    return {
        name: fit_curve(
            (row.num_elements / row.num_tensors, row.seconds / row.num_tensors) for row in rows if row.kind == name
        )
        for name in sorted({row.kind for row in rows})
    }


def trainable_elements(graph: Graph, parameters: Sequence[int]) -> NDArray[np.int64]:
    """Elements of each trainable one among the parameters (shape: trainable parameters)."""
    tensors = (graph.tensors[i] for i in parameters)
    return np.array([tensor.num_elements(0) for tensor in tensors if tensor.requires_grad], np.int64)


def step_seconds(
    elements: NDArray[np.int64], optimizer: Optimizer, kind: DeviceKind, dtype: str, curve: Curve | None
) -> float:
    """Seconds of one step over tensors of these sizes (shape: tensors); 0 if there are none."""
    if not len(elements):
        return 0.0
    if curve is not None:
        return float(curve.at(elements.astype(np.float64)).sum())
    width, states = DTYPE_BYTES[dtype], state_bytes(optimizer, dtype)
    moved = 3 * width + 2 * states
    return float(elements.sum()) * moved / kind.memory_bandwidth_bytes_per_s + LAUNCH_S


def copy_seconds(elements: NDArray[np.int64], kind: DeviceKind, dtype: str, curve: Curve | None) -> float:
    """Seconds to copy tensors of these sizes (shape: tensors), one by one; 0 if there are none."""
    if curve is not None and len(elements):
        return float(curve.at(elements.astype(np.float64)).sum())
    moved = 2 * float(elements.sum()) * DTYPE_BYTES[dtype]
    return moved / kind.memory_bandwidth_bytes_per_s + LAUNCH_S * len(elements)
