"""Number systems for trials of rules: doubles (float64), and the prime field (numbers modulo a prime p < 2^28).

In the field all ring laws (associativity, commutativity, distributivity) hold exactly, and two unequal results agree by
chance once in p. Products of two elements fit into int64, and so do sums of 2^35 elements.
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
    """A number system: how its arrays are added, multiplied and mapped. Arrays are NumPy's, of `dtype`."""

    @property
    def dtype(self) -> type[np.generic]:
        """The NumPy dtype of arrays of these numbers."""

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the results of additions or multiplications as elements of the number system."""

    def constant(self, value: Fraction) -> Any:
        """Return a rational number as an element of the number system."""

    def apply(self, function: str, *arguments: NDArray[Any]) -> NDArray[Any]:
        """Return the values of a function of `functions.FUNCTIONS`, elementwise."""

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return an array of random numbers for a trial."""


@dataclass(frozen=True, slots=True)
class Doubles:
    """Floating-point numbers of 64 bits."""

    @property
    def dtype(self) -> type[np.generic]:
        """The dtype float64."""
        return np.float64

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values themselves."""
        return values

    def constant(self, value: Fraction) -> Any:
        """Return the nearest double."""
        return float(value)

    def apply(self, function: str, *arguments: NDArray[Any]) -> NDArray[Any]:
        """Return the real function's values; a cast rounds to a grid that depends on its dtype."""
        if function.startswith(("cast:", "bitcast:")):
            grid = 1 + salt_of(function) % 97
            rounded = np.round(arguments[0] * grid) / grid
            return rounded if function.startswith("cast:") else rounded + grid
        with np.errstate(all="ignore"):
            return np.asarray(function_of(function).compute(*arguments), np.float64)

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return numbers of a standard normal distribution."""
        return rng.standard_normal(shape)


@dataclass(frozen=True, slots=True)
class PrimeField:
    """Whole numbers modulo `PRIME`.

    A function with few known properties is replaced by a pseudo-random function, chosen by ``seed``, that has them.
    """

    seed: int = 0

    @property
    def dtype(self) -> type[np.generic]:
        """The dtype int64."""
        return np.int64

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the remainders modulo `PRIME`."""
        return values % PRIME

    def constant(self, value: Fraction) -> Any:
        """Return a rational number modulo `PRIME`: numerator times the modular inverse of the denominator."""
        return value.numerator * pow(value.denominator, PRIME - 2, PRIME) % PRIME

    def apply(self, function: str, *arguments: NDArray[Any]) -> NDArray[Any]:
        """Return the values of a function on the field that has the known properties of the real function."""
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
        """Return uniformly distributed elements other than 0."""
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
