"""A call of an operator by its shapes, and the labels of dims that its functions write (`computed`, `views`).

A label that begins with a capital cannot be split; a dim of size one has no label, because it is broadcast.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Dim = tuple[tuple[str, int], ...]
Shape = tuple[int, ...]
Dims = tuple[Dim, ...]
# Dims of the inputs and of the outputs.
Found = tuple[list[Dims], list[Dims]]


class OpSignature(NamedTuple):
    """An op: its operator, attributes, and the shapes of its inputs and outputs."""

    operator: str
    attributes: dict[str, str]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def number(self, name: str, default: int) -> int:
        """A whole number among the attributes."""
        text = self.attributes.get(name, "")
        return int(text) if re.fullmatch(r"-?\d+", text) else default

    def numbers(self, name: str) -> list[int]:
        """All whole numbers of an attribute."""
        return [int(text) for text in re.findall(r"-?\d+", self.attributes.get(name, ""))]

    def dim(self, name: str = "dim", default: int = 0) -> int:
        """A dim of the first input, counted from the front."""
        return self.number(name, default) % max(len(self.inputs[0]), 1)


def one(label: str, size: int) -> Dim:
    """A dim of one factor; of none where its size is one."""
    return ((label, size),) if size != 1 else ()


def plain(shape: Shape) -> Dims:
    """A label for each dim, from the front."""
    return tuple(one(f"d{i}", size) for i, size in enumerate(shape))


def unknown(call: OpSignature) -> Found:
    """Nothing can be split."""
    return [whole(s, i) for i, s in enumerate(call.inputs)], [whole(s, "out") for s in call.outputs]


def whole(shape: Shape, tag: object) -> Dims:
    """Dims that cannot be split."""
    return tuple(one(f"X{tag}.{i}", size) for i, size in enumerate(shape))


def with_fixed(dims: Dims, fixed: Sequence[int]) -> Dims:
    """The same, some of them not to be split."""
    return tuple(
        tuple((f"X{label}.{size}", size) for label, size in d) if i in fixed else d for i, d in enumerate(dims)
    )


def aligned(shape: Shape, rank: int) -> Dims:
    """Labels of dims that broadcast against those of a tensor of ``rank`` dims."""
    return tuple(one(f"d{i + rank - len(shape)}", size) for i, size in enumerate(shape))
