"""Whole numbers with letters (`Polynomial`), and the interface on which definitions of operators run (`Arithmetic`).

A polynomial is over sizes, indices and attributes, in one canonical form. A letter is a name, or represents an index
that is itself a value of a tensor (`data_letter`: the row that an embedding looks up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol, TypeAlias

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


# A definition receives an `Arithmetic` and its operands, and returns the result as an `Indexed`: a tensor that is a
# function of its indices. The same definition is run by `symbols.Symbols` for symbolic sizes, to prove, and by
# `arrays.Arrays` for numeric sizes, to compute.
class Arithmetic(Protocol):
    """The operations of operator definitions. Scalars have ``+``, ``-`` and ``*``; indices too."""

    def total(self, extent: Index, body: Callable[[Index], Scalar]) -> Scalar:
        """Return the sum of ``body(k)`` over 0 <= k < extent."""

    def largest(self, extent: Index, body: Callable[[Index], Scalar]) -> Scalar:
        """Return the largest ``body(k)`` over 0 <= k < extent."""

    def lowest(self) -> Scalar:
        """Return a value below all numbers: never chosen by `largest`."""

    def within(self, index: Index, low: Index, high: Index) -> Condition:
        """Return whether ``low <= index < high``."""

    def both(self, *conditions: Condition) -> Condition:
        """Return whether all conditions hold."""

    def choose(self, condition: Condition, then: Scalar, otherwise: Scalar) -> Scalar:
        """Return ``then`` where the condition holds, else ``otherwise``."""

    def select(self, truth: Scalar, then: Scalar, otherwise: Scalar) -> Scalar:
        """Return ``then`` where ``truth`` is 1, ``otherwise`` where it is 0."""

    def apply(self, function: str, *arguments: Scalar) -> Scalar:
        """Return a function of numbers (`functions`)."""

    def number(self, value: Any) -> Scalar:
        """Return a constant as a scalar."""

    def inverse_size(self, extent: Index) -> Scalar:
        """Return one divided by a size."""

    def divided(self, index: Index, by: Index) -> tuple[Index, Index]:
        """Return the quotient, rounded down, and the remainder."""

    def looked_up(self, value: Scalar, extent: Index) -> Index:
        """Return a scalar, from 0 to below ``extent``, as an index."""

    def same(self, one: Index, other: Index, why: str) -> None:
        """Demand that two sizes are equal; IllTypedError if they cannot be."""

    def repeats(self, size: Index, wanted: Index, why: str) -> bool:
        """Return whether a size of 1 is repeated to another; IllTypedError if it is neither 1 nor the other."""

    def quotient(self, extent: Index, by: Index, why: str) -> Index:
        """Return the whole quotient of a size that must be divisible; IllTypedError if it cannot be."""

    def ordered(self, low: Index, high: Index, why: str) -> None:
        """Demand that one size is not above another; IllTypedError if it is."""

    def floored(self, number: Index, by: Index) -> Index:
        """Return a quotient, rounded down."""


Letter: TypeAlias = str
Monomial: TypeAlias = "tuple[Letter, ...]"

_DATA: dict[Letter, Any] = {}


class NotExpressibleError(Exception):
    """A value that has no form in letters, though it may be a number at some sizes."""


def data_letter(value: Any) -> Letter:
    """Return the letter of an index that is the value of a tensor, in its normal form."""
    letter = f"@{value!r}"
    _DATA[letter] = value
    return letter


def data_value(letter: Letter) -> Any:
    """Return the value that a letter represents; None for all other letters."""
    return _DATA.get(letter) if letter[0] == "@" else None


@dataclass(frozen=True, slots=True)
class Inverse:
    """One divided by a number that is a letter."""

    of: Polynomial


class Polynomial:
    """A polynomial with whole coefficients; equal exactly if the canonical forms are. Immutable."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        kept = [(monomial, factor) for monomial, factor in terms.items() if factor]
        kept.sort()
        self.terms = tuple(kept)
        self._hash = hash(self.terms)

    @staticmethod
    def of(number: int | Polynomial) -> Polynomial:
        """Return the number as a polynomial."""
        return number if isinstance(number, Polynomial) else Polynomial({(): int(number)})

    @staticmethod
    def letter(name: Letter) -> Polynomial:
        """Return the polynomial of one letter."""
        return Polynomial({(name,): 1})

    def __add__(self, other: int | Polynomial) -> Polynomial:
        if other == 0:
            return self
        sums = dict(self.terms)
        for monomial, factor in Polynomial.of(other).terms:
            sums[monomial] = sums.get(monomial, 0) + factor
        return Polynomial(sums)

    __radd__ = __add__

    def __neg__(self) -> Polynomial:
        return Polynomial({monomial: -factor for monomial, factor in self.terms})

    def __sub__(self, other: int | Polynomial) -> Polynomial:
        return self + -Polynomial.of(other)

    def __rsub__(self, other: int | Polynomial) -> Polynomial:
        return Polynomial.of(other) + -self

    def __mul__(self, other: int | Polynomial) -> Polynomial:
        if other == 1:
            return self
        products: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in Polynomial.of(other).terms:
                monomial = tuple(sorted(left + right))
                products[monomial] = products.get(monomial, 0) + a * b
        return Polynomial(products)

    __rmul__ = __mul__

    def __floordiv__(self, other: int | Polynomial) -> Polynomial:
        """The quotient, where it is whole for all sizes; NotExpressibleError elsewhere."""
        split = self.split_by(Polynomial.of(other))
        if split is None or split[1].terms:
            raise NotExpressibleError(f"{self} is not a multiple of {other}")
        return split[0]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Polynomial):
            return self.terms == other.terms
        return isinstance(other, int) and self.constant == other

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        parts = []
        for monomial, factor in self.terms:
            letters = "·".join(monomial)
            parts.append(letters if letters and factor == 1 else f"{factor}·{letters}" if letters else str(factor))
        return " + ".join(parts).replace("+ -1·", "- ").replace("+ -", "- ") or "0"

    @property
    def constant(self) -> int | None:
        """The number, if there are no letters."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def single(self) -> Letter | None:
        """The letter, if the polynomial is just one letter."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def letters(self) -> Iterator[Letter]:
        """All letters, possibly repeated."""
        for monomial, _ in self.terms:
            yield from monomial

    def factor_of(self, letter: Letter) -> Polynomial:
        """Return the factor of the letter; meaningful only if the letter occurs in the first power."""
        return Polynomial({_without(m, letter): c for m, c in self.terms if letter in m})

    def primitive(self) -> Polynomial:
        """Return the polynomial without the factors that all its terms share.

        It is 0 where this one is, if no letter is 0.
        """
        if not self.terms:
            return self
        scale = gcd(*(factor for _, factor in self.terms))
        shared = self.terms[0][0]
        for monomial, _ in self.terms[1:]:
            shared = _shared(shared, monomial)
        return Polynomial({_divided(monomial, shared) or (): factor // scale for monomial, factor in self.terms})

    def substitute(self, values: Mapping[Letter, Polynomial]) -> Polynomial:
        """Return the polynomial with letters replaced by polynomials."""
        if not any(letter in values for letter in self.letters()):
            return self
        result = Polynomial({})
        for monomial, factor in self.terms:
            product = Polynomial({(): factor})
            for letter in monomial:
                product = product * values.get(letter, Polynomial.letter(letter))
            result = result + product
        return result

    def split_by(self, divisor: Polynomial) -> tuple[Polynomial, Polynomial] | None:
        """Return (quotient, rest) of a division, term by term: self = quotient * divisor + rest.

        None unless ``divisor`` is one term.

        The rest is the true remainder only where it is known to be in [0, divisor).
        """
        if len(divisor.terms) != 1:
            return None
        (by, scale), quotient, rest = divisor.terms[0], {}, {}
        for monomial, factor in self.terms:
            left = _divided(monomial, by)
            if left is None or factor % scale:
                rest[monomial] = factor
            else:
                quotient[left] = factor // scale
        return Polynomial(quotient), Polynomial(rest)


# A guard is a polynomial that is at least 0.
Guard: TypeAlias = Polynomial
Guards: TypeAlias = "frozenset[Guard]"
NO_GUARDS: Guards = frozenset()


def _without(monomial: Monomial, letter: Letter) -> Monomial:
    place = monomial.index(letter)
    return monomial[:place] + monomial[place + 1 :]


def _shared(one: Monomial, other: Monomial) -> Monomial:
    left, both = list(other), []
    for letter in one:
        if letter in left:
            left.remove(letter)
            both.append(letter)
    return tuple(both)


def _divided(monomial: Monomial, by: Monomial) -> Monomial | None:
    for letter in by:
        if letter not in monomial:
            return None
        monomial = _without(monomial, letter)
    return monomial
