"""`Arrays`: the arithmetic that computes operator definitions for numeric sizes, over doubles or a prime field.

All elements of a result, and all terms of the sums in them, are computed at once. An index is an array of whole numbers
along its own axis; a scalar is an array that broadcasts over all axes. Axis 0 counts independent random draws.
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
    """A scalar of a definition at all indices at once; ``values`` has the shape (draws, one axis per index...)."""

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
    """An `Arithmetic` whose scalars are arrays of elements of the number system ``numbers``."""

    numbers: NumberField
    _axis: int = field(default=1, init=False)

    def compute(self, result: Indexed) -> NDArray[Any]:
        """Return all elements of a result, shape (draws, sizes...).

        Raises IllTypedError if the result is empty or its computation is too large.
        """
        rank = result.rank
        if min(result.shape, default=1) < 1:
            raise IllTypedError(f"the result would be empty: its sizes are {result.shape}")
        self._axis = 1 + rank
        index = [self._places(axis + 1, size) for axis, size in enumerate(result.shape)]
        values = result.at(*index).values
        draws = values.shape[0]
        full = np.broadcast_to(values, (draws, *result.shape, *(1,) * (_AXES - 1 - rank)))
        return np.ascontiguousarray(full.reshape(draws, *result.shape))

    def operand(self, values: NDArray[Any]) -> Indexed:
        """Return the tensor whose elements are ``values``, shape (draws, sizes...)."""
        return Indexed(tuple(values.shape[1:]), lambda *index: self._gathered(values, index))

    def total(self, extent: int, body: Callable[[Any], Element]) -> Element:
        """Return the sum of ``body(k)`` over 0 <= k < extent."""
        values, axis = self._spread(extent, body)
        return Element(self.numbers, self.numbers.reduce(values.sum(axis=axis, keepdims=True)))

    def largest(self, extent: int, body: Callable[[Any], Element]) -> Element:
        """Return the largest ``body(k)`` over 0 <= k < extent."""
        values, axis = self._spread(extent, body)
        return Element(self.numbers, self._unordered(self._ordered(values).max(axis=axis, keepdims=True)))

    def lowest(self) -> Element:
        """Return a value that is not above any number: -inf, or the lowest element of the field."""
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
        """Return ``then`` where ``truth`` is 1, ``otherwise`` where it is 0; the value not chosen may be infinite."""
        if self.numbers.dtype is np.float64:
            return Element(self.numbers, np.where(truth.values != 0, then.values, otherwise.values))
        # Over a field, the condition tensor holds arbitrary numbers; the formula as a whole is compared.
        return truth * then + (self.number(1) - truth) * otherwise

    def apply(self, function: str, *arguments: Element) -> Element:
        """Return the value of a function of `functions.FUNCTIONS` at scalars."""
        return Element(self.numbers, self.numbers.apply(function, *(argument.values for argument in arguments)))

    def number(self, value: float | Fraction) -> Element:
        """Return a constant as a scalar."""
        return self._constant(self.numbers.constant(Fraction(value)))

    def inverse_size(self, extent: int) -> Element:
        """Return one divided by a size."""
        return self.number(Fraction(1, extent))

    def divided(self, index: Any, by: int) -> tuple[Any, Any]:
        """Return (quotient rounded down, remainder) of an index."""
        return index // by, index % by

    def looked_up(self, value: Element, extent: int) -> Any:
        """Return a scalar as an index: its whole part modulo ``extent``."""
        return np.asarray(value.values, np.int64) % extent

    def same(self, one: int, other: int, why: str) -> None:
        """Raise IllTypedError, with ``why``, unless two sizes are equal."""
        if one != other:
            raise IllTypedError(f"{why}: {one} and {other}")

    def repeats(self, size: int, wanted: int, why: str) -> bool:
        """Return whether a dim of size 1 is repeated to ``wanted``; raise IllTypedError unless size is 1 or wanted."""
        if size != 1:
            self.same(size, wanted, why)
        return bool(size == 1 and wanted != 1)

    def quotient(self, extent: int, by: int, why: str) -> int:
        """Return extent / by; raise IllTypedError unless ``extent`` is a multiple of ``by``."""
        if by < 1 or extent % by:
            raise IllTypedError(f"{why}: {extent} is not a multiple of {by}")
        return extent // by

    def ordered(self, low: int, high: int, why: str) -> None:
        """Raise IllTypedError, with ``why``, unless low <= high."""
        if low > high:
            raise IllTypedError(f"{why}: {low} is above {high}")

    def floored(self, number: int, by: int) -> int:
        """Return number / by, rounded down."""
        return number // by

    def _places(self, axis: int, size: int) -> NDArray[Any]:
        return np.arange(size).reshape((1,) * axis + (size,) + (1,) * (_AXES - axis - 1))

    def _constant(self, value: Any) -> Element:
        return Element(self.numbers, np.full((1,) * _AXES, value, self.numbers.dtype))

    def _spread(self, extent: int, body: Callable[[Any], Element]) -> tuple[NDArray[Any], int]:
        if extent < 1:
            raise IllTypedError(f"a sum or maximum runs over {extent} values; expected at least 1")
        axis = self._axis
        self._axis += 1
        try:
            values = body(self._places(axis, extent)).values
        finally:
            self._axis = axis
        shape = (*values.shape[:axis], extent, *values.shape[axis + 1 :])
        if np.prod(shape, dtype=np.float64) > _MOST_ELEMENTS:
            raise IllTypedError(f"an intermediate array would have more than {_MOST_ELEMENTS:,} elements")
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
