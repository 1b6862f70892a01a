"""Whole numbers with letters: polynomials over sizes, indices and attributes, in one canonical form.

A letter is a name, or represents an index that is itself a value of a tensor (`data_letter`: the row that an embedding
looks up).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Letter: TypeAlias = str
Monomial: TypeAlias = "tuple[Letter, ...]"

_DATA: dict[Letter, Any] = {}


class NotExpressibleError(Exception):
    """A value that has no form in letters, though it may be a number at some sizes."""


def data_letter(value: Any) -> Letter:
    """The letter of an index that is the value of a tensor, in its normal form."""
    letter = f"@{value!r}"
    _DATA[letter] = value
    return letter


def data_value(letter: Letter) -> Any:
    """The value that a letter represents; None for all other letters."""
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
        """The number as a polynomial."""
        return number if isinstance(number, Polynomial) else Polynomial({(): int(number)})

    @staticmethod
    def letter(name: Letter) -> Polynomial:
        """The polynomial of one letter."""
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
        """The factor of the letter; meaningful only if the letter occurs in the first power."""
        return Polynomial({_without(m, letter): c for m, c in self.terms if letter in m})

    def primitive(self) -> Polynomial:
        """The polynomial without the factors that all its terms share: it is 0 where this one is, if no letter is 0."""
        if not self.terms:
            return self
        scale = gcd(*(factor for _, factor in self.terms))
        shared = self.terms[0][0]
        for monomial, _ in self.terms[1:]:
            shared = _shared(shared, monomial)
        return Polynomial({_divided(monomial, shared) or (): factor // scale for monomial, factor in self.terms})

    def substitute(self, values: Mapping[Letter, Polynomial]) -> Polynomial:
        """Letters exchanged for polynomials."""
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
        """(quotient, rest) with self = quotient * divisor + rest, term by term; None unless ``divisor`` is one term.

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
