"""Operator calls described by their shapes (`OpSignature`), and helpers that label dims, for `dims` and `views`.

A label that begins with a capital letter marks a dim that cannot be split. A dim of size one has no label, because it
is broadcast.
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
    """One call of an operator: its name (``softmax``), its attributes as text, and the shapes of inputs and outputs."""

    operator: str
    attributes: dict[str, str]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def number(self, name: str, default: int) -> int:
        """Return an attribute as a whole number; ``default`` if it is missing or is not a whole number."""
        text = self.attributes.get(name, "")
        return int(text) if re.fullmatch(r"-?\d+", text) else default

    def numbers(self, name: str) -> list[int]:
        """Return all whole numbers in the text of an attribute; [] if it is missing."""
        return [int(text) for text in re.findall(r"-?\d+", self.attributes.get(name, ""))]

    def dim(self, name: str = "dim", default: int = 0) -> int:
        """Return the attribute ``name`` as the index of a dim of the first input; a negative index is made positive."""
        return self.number(name, default) % max(len(self.inputs[0]), 1)


def one(label: str, size: int) -> Dim:
    """Return a dim with one label; a dim of size one gets no label."""
    return ((label, size),) if size != 1 else ()


def plain(shape: Shape) -> Dims:
    """Return the dims of a shape with the labels d0, d1, ... from the front."""
    return tuple(one(f"d{i}", size) for i, size in enumerate(shape))


def unknown(call: OpSignature) -> Found:
    """Return dims for an unknown operator: no dim can be split."""
    return [whole(s, i) for i, s in enumerate(call.inputs)], [whole(s, "out") for s in call.outputs]


def whole(shape: Shape, tag: object) -> Dims:
    """Return dims of a shape with labels that cannot be split; ``tag`` makes the labels unique within an op."""
    return tuple(one(f"X{tag}.{i}", size) for i, size in enumerate(shape))


def with_fixed(dims: Dims, fixed: Sequence[int]) -> Dims:
    """Return ``dims`` with the dims at the indices ``fixed`` relabelled so that they cannot be split."""
    return tuple(
        tuple((f"X{label}.{size}", size) for label, size in d) if i in fixed else d for i, d in enumerate(dims)
    )


def aligned(shape: Shape, rank: int) -> Dims:
    """Return dims of a shape that broadcasts against a tensor of ``rank`` dims: labels match from the last dim on."""
    return tuple(one(f"d{i + rank - len(shape)}", size) for i, size in enumerate(shape))
