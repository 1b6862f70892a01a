"""The type of converters (from an ATen call to terms), and the table of all converters.

A converter receives a `Reader` and the call's arguments by name. It returns a term (a tuple of terms for several
results), or None if no declared operator computes the call, such as an average pool that does not count its padding.
Then the call stays opaque. It also stays opaque if a term's shape or dtype differs from that of torch's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from meshwright.rewrite.terms import TensorType

if TYPE_CHECKING:
    from meshwright.rewrite.fx.reading import Reader

Found: TypeAlias = "int | tuple[int, ...] | None"
Converter: TypeAlias = "Callable[[Reader, dict[str, Any]], Found]"

CONVERTERS: dict[str, Converter] = {}
# In-place operators compute the same as their plain variants.
_IN_PLACE_UNARY = (
    *("relu", "silu", "sigmoid", "tanh", "exp", "neg", "abs", "sqrt", "rsqrt", "gelu", "hardtanh", "relu6", "clamp"),
)
_IN_PLACE_BINARY = ("add", "sub", "mul", "div")
IN_PLACE = {
    f"aten.{name}_.{overload}": f"aten.{name}.{overload}"
    for name, overload in (
        *((name, "default") for name in _IN_PLACE_UNARY),
        *((name, overload) for name in _IN_PLACE_BINARY for overload in ("Tensor", "Scalar")),
    )
}


def converts(*names: str) -> Callable[[Converter], Converter]:
    """Register the decorated converter for ATen operators, named with overload, like "add.Tensor"."""

    def declare(converter: Converter) -> Converter:
        for name in names:
            CONVERTERS[f"aten.{name}"] = converter
        return converter

    return declare


def as_tuple(value: Any, count: int) -> tuple[int, ...]:
    """Return ``count`` numbers, one per dim, from one number (repeated) or a sequence."""
    if isinstance(value, Sequence):
        return tuple(value) * (count if len(value) == 1 else 1)
    return (value,) * count


def expected_type(value: torch.Tensor) -> TensorType:
    """Return the type (shape and dtype) of a tensor, real or fake."""
    return TensorType(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))
