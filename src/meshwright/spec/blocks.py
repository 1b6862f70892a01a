"""A hash of a layer's structure (`block_signature`), equal for layers that differ only in the names of weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec.graph import Op, Tensor


def block_signature(ops: Sequence[Op], tensors: Sequence[Tensor], start: int, stop: int) -> str:
    """Return a hash of the structure of the ops ``start:stop`` of a graph: 12 hexadecimal digits.

    The hash covers operators, attributes, FLOPs, shapes, dtypes and connections. Tensors are numbered within the range,
    so their names and their positions in the graph do not matter.
    """
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
