"""Number systems for checking laws: doubles, and the prime field of p < 2^28 elements.

Over the field every ring law is exact, and two different sides agree by chance once in p. Products of two elements fit
into int64, and so do sums of 2^35 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from meshwright.rewrite.calculus.functions import function_of, salt_of

if TYPE_CHECKING:
    from fractions import Fraction

    from numpy.typing import NDArray

PRIME = 268_435_399

# Odd constants of a 64-bit mixing function (splitmix64: Steele, Lea and Flood, 2014).
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class NumberField(Protocol):
    """How arrays of numbers are added, multiplied and mapped."""

    @property
    def dtype(self) -> type[np.generic]:
        """The dtype of arrays of these numbers."""

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Bring results of additions and multiplications into the numbers' range."""

    def constant(self, value: Fraction) -> Any:
        """Return a constant."""

    def apply(self, function: str, *arguments: NDArray[Any]) -> NDArray[Any]:
        """Return a function of `FUNCTIONS`."""

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        """Random numbers to compute with."""


@dataclass(frozen=True, slots=True)
class Doubles:
    """Floating-point numbers of 64 bits."""

    @property
    def dtype(self) -> type[np.generic]:
        """Doubles."""
        return np.float64

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values themselves."""
        return values

    def constant(self, value: Fraction) -> Any:
        """Return the nearest double."""
        return float(value)

    def apply(self, function: str, *arguments: NDArray[Any]) -> NDArray[Any]:
        """Return the function of real numbers."""
        if function.startswith(("cast:", "bitcast:")):
            grid = 1 + salt_of(function) % 97
            rounded = np.round(arguments[0] * grid) / grid
            return rounded if function.startswith("cast:") else rounded + grid
        with np.errstate(all="ignore"):
            return np.asarray(function_of(function).compute(*arguments), np.float64)

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        """Normal numbers."""
        return rng.standard_normal(shape)


@dataclass(frozen=True, slots=True)
class PrimeField:
    """Whole numbers modulo `PRIME`; functions with few known properties are random ones, by ``seed``."""

    seed: int = 0

    @property
    def dtype(self) -> type[np.generic]:
        """Whole numbers."""
        return np.int64

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Remainders."""
        return values % PRIME

    def constant(self, value: Fraction) -> Any:
        """Return a whole number or the quotient of two."""
        return value.numerator * pow(value.denominator, PRIME - 2, PRIME) % PRIME

    def apply(self, function: str, *arguments: NDArray[Any]) -> NDArray[Any]:
        """Return the function of the field that has the properties of the real one."""
        known = function_of(function)
        if function == "reciprocal":
            return _power(arguments[0], PRIME - 2)
        signed = [_signed(argument) for argument in np.broadcast_arrays(*arguments)]
        if known.in_field is not None:
            return np.asarray(known.in_field(*signed), np.int64) % PRIME
        result = self._random_function(function, signed)
        if known.at_0 is not None:
            result = np.where(arguments[0] == 0, known.at_0, result)
        return result % PRIME

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return elements other than 0."""
        return rng.integers(1, PRIME, shape)

    def _random_function(self, function: str, arguments: list[NDArray[Any]]) -> NDArray[Any]:
        known = function_of(function)
        salt = salt_of(function) + self.seed * 0x9E3779B1
        first = arguments[0]
        size = np.abs(first) if known.odd or known.even else first
        if known.idempotent:
            result = size - size % (salt % 37 + 5)
        elif len(arguments) == 2 and known.commutative:
            low, high = np.minimum(*arguments), np.maximum(*arguments)
            result = _mixed(_mixed(low, salt) + high, salt + 1)
        else:
            result = _mixed(size, salt)
            for argument in arguments[1:]:
                result = _mixed(result + argument, salt + 1)
        return np.asarray(result * np.sign(first) if known.odd else result, np.int64)


def _signed(values: NDArray[Any]) -> NDArray[Any]:
    """Representatives from -p/2 to p/2."""
    return np.where(values > PRIME // 2, values - PRIME, values)


def _mixed(values: NDArray[Any], salt: int) -> NDArray[Any]:
    """A random-looking function of whole numbers into the field."""
    mixed = values.astype(np.uint64) + np.uint64(salt % 2**63)
    for constant in _MIX:
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(constant)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray(mixed % np.uint64(PRIME), np.int64)


def _power(values: NDArray[Any], exponent: int) -> NDArray[Any]:
    result = np.ones_like(values)
    while exponent:
        if exponent & 1:
            result = result * values % PRIME
        values = values * values % PRIME
        exponent >>= 1
    return result
