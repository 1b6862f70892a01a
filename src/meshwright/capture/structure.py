"""How much crosses a cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec import Op, Tensor


def crossing_bytes(ops: Sequence[Op], tensors: Sequence[Tensor], outputs: Sequence[int], batch_size: int) -> list[int]:
    """Bytes of values made before each position and used at or after it."""
    last: dict[int, int] = {i: len(ops) for i in outputs}
    for position in range(len(ops) - 1, -1, -1):
        for i in ops[position].inputs:
            last.setdefault(i, position)
    change = [0] * (len(ops) + 2)
    for position, op in enumerate(ops):
        if not op.replicable:
            for i in op.outputs:
                end = last.get(i, position)
                change[position + 1] += tensors[i].num_bytes(batch_size)
                change[end + 1] -= tensors[i].num_bytes(batch_size)
    crossing, level = [], 0
    for position in range(len(ops) + 1):
        level += change[position]
        crossing.append(level)
    return crossing
