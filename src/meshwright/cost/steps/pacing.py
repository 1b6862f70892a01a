"""How long work takes whose kernels a host starts one by one, as eager frameworks do.

    paced    (device³ + host³)^(1/3)        host = kernels · seconds that the host takes to start one

The host runs ahead of the device as long as it is faster. Within a layer the two take turns: beside a long product the
host gains time, beside short kernels the device waits. So near balance a layer takes longer than the larger of both,
and far from it as long as the larger. The power was chosen on the calibration rows, of 2, 2.5, 3 and 4.

Kernels that a layer starts (megatron/model/transformer.py of Megatron-LM 2.x): a forward op one. Backward, a product
with parameters one for its input, and for its weight one, one that sums the gradient of the bias and two that add to
the gradients of both; other products two; a pass two, and a norm two more that add to gradients; a collective one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwright.cost.steps.counted import CountedOp

_POWER = 3.0
_WEIGHT_GRADIENT, _PASS_BACKWARD, _NORM_BACKWARD = 4, 2, 4


def paced(device_s: float, host_s: float) -> float:
    """Seconds of work that keeps the device busy for ``device_s`` and the host for ``host_s``."""
    longer = max(device_s, host_s)
    if longer == 0.0:
        return 0.0
    ratio = min(device_s, host_s) / longer
    return float(longer * (1.0 + ratio**_POWER) ** (1.0 / _POWER))


def count_kernels(ops: Iterable[CountedOp]) -> float:
    """Kernels that the host starts for these ops."""
    return sum(op.count * _kernels(op) for op in ops)


def _kernels(op: CountedOp) -> int:
    if op.part == "forward" or op.group:
        return 1
    if op.part == "weight_gradient":
        return _WEIGHT_GRADIENT
    if op.op == "memory":
        return _NORM_BACKWARD if "norm" in op.name else _PASS_BACKWARD
    return 2 if op.op == "attention" else 1
