"""Signatures of operator calls by their shapes, and labels of dims that the functions of `dims` and `views` write.

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
        """Return an attribute as a whole number, ``default`` if it is not one."""
        text = self.attributes.get(name, "")
        return int(text) if re.fullmatch(r"-?\d+", text) else default

    def numbers(self, name: str) -> list[int]:
        """Return all whole numbers of an attribute."""
        return [int(text) for text in re.findall(r"-?\d+", self.attributes.get(name, ""))]

    def dim(self, name: str = "dim", default: int = 0) -> int:
        """Return the index of a dim of the first input, counted from the front."""
        return self.number(name, default) % max(len(self.inputs[0]), 1)


def one(label: str, size: int) -> Dim:
    """Return a dim of one factor; without factors if its size is one."""
    return ((label, size),) if size != 1 else ()


def plain(shape: Shape) -> Dims:
    """Return a label for each dim, from the front."""
    return tuple(one(f"d{i}", size) for i, size in enumerate(shape))


def unknown(call: OpSignature) -> Found:
    """Return dims for an unknown operator: all stay whole."""
    return [whole(s, i) for i, s in enumerate(call.inputs)], [whole(s, "out") for s in call.outputs]


def whole(shape: Shape, tag: object) -> Dims:
    """Return dims that cannot be split."""
    return tuple(one(f"X{tag}.{i}", size) for i, size in enumerate(shape))


def with_fixed(dims: Dims, fixed: Sequence[int]) -> Dims:
    """Return the dims with those at indices ``fixed`` marked as not to be split."""
    return tuple(
        tuple((f"X{label}.{size}", size) for label, size in d) if i in fixed else d for i, d in enumerate(dims)
    )


def aligned(shape: Shape, rank: int) -> Dims:
    """Return labels of dims that broadcast against those of a tensor of ``rank`` dims."""
    return tuple(one(f"d{i + rank - len(shape)}", size) for i, size in enumerate(shape))
