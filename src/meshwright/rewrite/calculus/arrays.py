"""`Arrays`: the machine that runs definitions for sizes that are numbers, over doubles or a prime field.

All indices of a result, and of the sums inside of it, are computed at once: an index is an array of whole numbers along
an axis of its own, a scalar an array over all axes. Axis 0 is a batch of independent draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.rewrite.calculus.fields import PRIME, NumberField
from meshwright.rewrite.calculus.whole import IllTypedError, Indexed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


# Dims of a result and sums inside of it: NumPy allows 64 axes.
_AXES = 16
_MOST_ELEMENTS = 2**26


@dataclass(frozen=True, slots=True)
class Element:
    """Scalars at many indices; ``values``: (draws, axes...)."""

    numbers: NumberField
    values: NDArray[Any]

    def __add__(self, other: Element) -> Element:
        return Element(self.numbers, self.numbers.reduce(self.values + other.values))

    def __sub__(self, other: Element) -> Element:
        return Element(self.numbers, self.numbers.reduce(self.values - other.values))

    def __mul__(self, other: Element) -> Element:
        return Element(self.numbers, self.numbers.reduce(self.values * other.values))

    def __neg__(self) -> Element:
        return Element(self.numbers, self.numbers.reduce(-self.values))


@dataclass(slots=True)
class Arrays:
    """Runs definitions over arrays of ``numbers``."""

    numbers: NumberField
    _axis: int = field(default=1, init=False)

    def compute(self, result: Indexed) -> NDArray[Any]:
        """All numbers of a result: (draws, sizes...). Raises IllTypedError for a result that is too large."""
        rank = result.rank
        if min(result.shape, default=1) < 1:
            raise IllTypedError(f"a result of sizes {result.shape}")
        self._axis = 1 + rank
        index = [self._places(axis + 1, size) for axis, size in enumerate(result.shape)]
        values = result.at(*index).values
        draws = values.shape[0]
        full = np.broadcast_to(values, (draws, *result.shape, *(1,) * (_AXES - 1 - rank)))
        return np.ascontiguousarray(full.reshape(draws, *result.shape))

    def operand(self, values: NDArray[Any]) -> Indexed:
        """Return the tensor of (draws, sizes...) numbers."""
        return Indexed(tuple(values.shape[1:]), lambda *index: self._gathered(values, index))

    def total(self, extent: int, body: Callable[[Any], Element]) -> Element:
        """Return the sum over an index."""
        values, axis = self._spread(extent, body)
        return Element(self.numbers, self.numbers.reduce(values.sum(axis=axis, keepdims=True)))

    def largest(self, extent: int, body: Callable[[Any], Element]) -> Element:
        """Return the largest over an index."""
        values, axis = self._spread(extent, body)
        return Element(self.numbers, self._unordered(self._ordered(values).max(axis=axis, keepdims=True)))

    def lowest(self) -> Element:
        """Return a value below all numbers."""
        low = -np.inf if self.numbers.dtype is np.float64 else self._unordered(np.array(-(PRIME // 2)))
        return self._constant(low)

    def within(self, index: Any, low: Any, high: Any) -> Any:
        """Return whether ``low <= index < high``."""
        return np.logical_and(index >= low, index < high)

    def both(self, *conditions: Any) -> Any:
        """Return whether all conditions hold."""
        result = conditions[0]
        for condition in conditions[1:]:
            result = np.logical_and(result, condition)
        return result

    def choose(self, condition: Any, then: Element, otherwise: Element) -> Element:
        """Return ``then`` where the condition holds, else ``otherwise``."""
        return Element(self.numbers, np.where(condition, then.values, otherwise.values))

    def select(self, truth: Element, then: Element, otherwise: Element) -> Element:
        """Return ``then`` where ``truth`` is 1, ``otherwise`` where it is 0; the other one may be infinite."""
        if self.numbers.dtype is np.float64:
            return Element(self.numbers, np.where(truth.values != 0, then.values, otherwise.values))
        # Over a field, the condition tensor holds arbitrary numbers; the formula as a whole is compared.
        return truth * then + (self.number(1) - truth) * otherwise

    def apply(self, function: str, *arguments: Element) -> Element:
        """Return a function of scalars."""
        return Element(self.numbers, self.numbers.apply(function, *(argument.values for argument in arguments)))

    def number(self, value: float | Fraction) -> Element:
        """Return a constant."""
        return self._constant(self.numbers.constant(Fraction(value)))

    def inverse_size(self, extent: int) -> Element:
        """One divided by a size."""
        return self.number(Fraction(1, extent))

    def divided(self, index: Any, by: int) -> tuple[Any, Any]:
        """Return the quotient, rounded down, and the remainder."""
        return index // by, index % by

    def looked_up(self, value: Element, extent: int) -> Any:
        """Return a scalar as an index."""
        return np.asarray(value.values, np.int64) % extent

    def same(self, one: int, other: int, why: str) -> None:
        """Demand that two sizes are equal."""
        if one != other:
            raise IllTypedError(f"{why}: {one} and {other}")

    def repeats(self, size: int, wanted: int, why: str) -> bool:
        """Return whether a size of 1 is repeated to another; otherwise both have to be equal."""
        if size != 1:
            self.same(size, wanted, why)
        return bool(size == 1 and wanted != 1)

    def quotient(self, extent: int, by: int, why: str) -> int:
        """Return the whole quotient of a size that must be divisible."""
        if by < 1 or extent % by:
            raise IllTypedError(f"{why}: {extent} is not a multiple of {by}")
        return extent // by

    def ordered(self, low: int, high: int, why: str) -> None:
        """Demand that one size is not above another."""
        if low > high:
            raise IllTypedError(f"{why}: {low} above {high}")

    def floored(self, number: int, by: int) -> int:
        """Return the quotient, rounded down."""
        return number // by

    def _places(self, axis: int, size: int) -> NDArray[Any]:
        return np.arange(size).reshape((1,) * axis + (size,) + (1,) * (_AXES - axis - 1))

    def _constant(self, value: Any) -> Element:
        return Element(self.numbers, np.full((1,) * _AXES, value, self.numbers.dtype))

    def _spread(self, extent: int, body: Callable[[Any], Element]) -> tuple[NDArray[Any], int]:
        if extent < 1:
            raise IllTypedError(f"an index over {extent} numbers")
        axis = self._axis
        self._axis += 1
        try:
            values = body(self._places(axis, extent)).values
        finally:
            self._axis = axis
        shape = (*values.shape[:axis], extent, *values.shape[axis + 1 :])
        if np.prod(shape, dtype=np.float64) > _MOST_ELEMENTS:
            raise IllTypedError("more numbers than `Arrays` is meant for")
        return np.broadcast_to(values, shape), axis

    def _gathered(self, values: NDArray[Any], index: Sequence[Any]) -> Element:
        if not index:
            return Element(self.numbers, values.reshape(-1, *(1,) * (_AXES - 1)))
        # Positions outside are clamped; a later choice drops their values.
        places = [
            np.clip(np.reshape(np.asarray(place), np.shape(place) or (1,) * _AXES), 0, size - 1)
            for place, size in zip(index, values.shape[1:], strict=True)
        ]
        draws = np.arange(values.shape[0]).reshape(-1, *(1,) * (_AXES - 1))
        return Element(self.numbers, values[(draws, *places)])

    def _ordered(self, values: NDArray[Any]) -> NDArray[Any]:
        """Numbers in an order: elements of a field as representatives around 0."""
        if self.numbers.dtype is np.float64:
            return values
        return np.where(values > PRIME // 2, values - PRIME, values)

    def _unordered(self, values: NDArray[Any]) -> NDArray[Any]:
        return self.numbers.reduce(values)
