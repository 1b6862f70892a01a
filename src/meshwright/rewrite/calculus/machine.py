"""The interface for definitions of operators: tensors that are functions of their indices.

A definition receives an `Arithmetic` and its operands, and returns the result as an `Indexed`. The same definition is
run by `symbols.Symbols` for symbolic sizes, to prove, and by `arrays.Arrays` for numeric sizes, to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

# An index or a size: a whole number, a polynomial, or an array of indices. A scalar: a machine's own type.
Index = Any
Scalar = Any
Condition = Any


class IllTypedError(Exception):
    """Operands that an operator does not accept, with the reason."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """A tensor: its sizes, and the scalar at an index."""

    shape: tuple[Index, ...]
    at: Callable[..., Scalar]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Scalar:
        places = index if isinstance(index, tuple) else (index,)
        if len(places) != len(self.shape):
            raise IllTypedError(f"{len(places)} places of a tensor of {len(self.shape)} dims")
        return self.at(*places)

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)


class Arithmetic(Protocol):
    """Scalars have ``+``, ``-`` and ``*``; indices too."""

    def total(self, extent: Index, body: Callable[[Index], Scalar]) -> Scalar:
        """The sum of ``body(k)`` over 0 <= k < extent."""

    def largest(self, extent: Index, body: Callable[[Index], Scalar]) -> Scalar:
        """The largest ``body(k)``."""

    def lowest(self) -> Scalar:
        """A value below all numbers: never chosen by `largest`."""

    def within(self, index: Index, low: Index, high: Index) -> Condition:
        """Whether ``low <= index < high``."""

    def both(self, *conditions: Condition) -> Condition:
        """Whether all hold."""

    def choose(self, condition: Condition, then: Scalar, otherwise: Scalar) -> Scalar:
        """One of two scalars."""

    def select(self, truth: Scalar, then: Scalar, otherwise: Scalar) -> Scalar:
        """One of two scalars, by a scalar that is 1 or 0."""

    def apply(self, function: str, *arguments: Scalar) -> Scalar:
        """A function of numbers (`functions`)."""

    def number(self, value: Any) -> Scalar:
        """A constant."""

    def inverse_size(self, extent: Index) -> Scalar:
        """One divided by a size."""

    def divided(self, index: Index, by: Index) -> tuple[Index, Index]:
        """Quotient and remainder."""

    def looked_up(self, value: Scalar, extent: Index) -> Index:
        """A scalar, from 0 to below ``extent``, as an index."""

    def same(self, one: Index, other: Index, why: str) -> None:
        """Demand that two sizes are equal; IllTypedError if they cannot be."""

    def repeats(self, size: Index, wanted: Index, why: str) -> bool:
        """Whether a size of 1 is repeated to another; IllTypedError if it is neither 1 nor the other."""

    def quotient(self, extent: Index, by: Index, why: str) -> Index:
        """The whole quotient of a size that must be divisible; IllTypedError if it cannot be."""

    def ordered(self, low: Index, high: Index, why: str) -> None:
        """Demand that one size is not above another; IllTypedError if it is."""

    def floored(self, number: Index, by: Index) -> Index:
        """A quotient, rounded down."""
