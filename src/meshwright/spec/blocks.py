"""The structure of a layer: equal for layers that compute the same, whatever the names of their weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec.graph import Op, Tensor


def block_signature(ops: Sequence[Op], tensors: Sequence[Tensor], start: int, stop: int) -> str:
    """Hash of a layer's structure: operators, attributes, sizes and connections, with values numbered in the layer."""
    numbers: dict[int, int] = {}
    text: list[Any] = []

    def describe(i: int) -> Any:
        known = i in numbers
        number = numbers.setdefault(i, len(numbers))
        tensor = tensors[i]
        looks = (tensor.role, [str(size) for size in tensor.shape], tensor.dtype, tensor.requires_grad)
        return number if known else (number, looks)

    for op in ops[start:stop]:
        wiring = [[describe(i) for i in ids] for ids in (op.inputs, op.outputs, op.saved)]
        text.append((op.kind, op.attributes, wiring, str(op.flops), str(op.backward_flops)))
    return hashlib.sha256(repr(text).encode()).hexdigest()[:12]
