"""`Polynomial`: whole numbers with letters; `Arithmetic`: the interface that definitions of operators use.

Letters stand for sizes, indices and attributes. A special kind of letter stands for an index that is itself an element
of a tensor, such as the row that an embedding looks up (`data_letter`).
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
    """An operator does not accept its operands or attributes; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """A tensor as a function of its index: its shape, and ``at``, which returns the scalar at an index."""

    shape: tuple[Index, ...]
    at: Callable[..., Scalar]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Scalar:
        places = index if isinstance(index, tuple) else (index,)
        if len(places) != len(self.shape):
            raise IllTypedError(f"a tensor of {len(self.shape)} dims is read at an index of {len(places)} dims")
        return self.at(*places)

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)


# A definition receives an `Arithmetic` and its operands, and returns the result as an `Indexed`: a tensor that is a
# function of its indices. The same definition is run by `symbols.Symbols` for symbolic sizes, to prove, and by
# `arrays.Arrays` for numeric sizes, to compute.
class Arithmetic(Protocol):
    """The operations that definitions of operators use, beside ``+``, ``-`` and ``*`` of scalars and indices.

    A scalar is an element of a tensor. An index is a whole number, also a size or an attribute. Implementations:
    `symbols.Symbols` and `arrays.Arrays`. ``why`` is quoted in errors.
    """

    def total(self, extent: Index, body: Callable[[Index], Scalar]) -> Scalar:
        """Return the sum of ``body(k)`` over 0 <= k < extent."""

    def largest(self, extent: Index, body: Callable[[Index], Scalar]) -> Scalar:
        """Return the largest ``body(k)`` over 0 <= k < extent."""

    def lowest(self) -> Scalar:
        """Return a value below all numbers, which `largest` never prefers to a number."""

    def within(self, index: Index, low: Index, high: Index) -> Condition:
        """Return whether ``low <= index < high``."""

    def both(self, *conditions: Condition) -> Condition:
        """Return whether all conditions hold."""

    def choose(self, condition: Condition, then: Scalar, otherwise: Scalar) -> Scalar:
        """Return ``then`` where the condition holds, else ``otherwise``."""

    def select(self, truth: Scalar, then: Scalar, otherwise: Scalar) -> Scalar:
        """Return ``then`` where ``truth`` is 1, ``otherwise`` where it is 0."""

    def apply(self, function: str, *arguments: Scalar) -> Scalar:
        """Return the value of a function of `functions.FUNCTIONS` at scalars."""

    def number(self, value: Any) -> Scalar:
        """Return a constant as a scalar."""

    def inverse_size(self, extent: Index) -> Scalar:
        """Return one divided by a size."""

    def divided(self, index: Index, by: Index) -> tuple[Index, Index]:
        """Return (quotient rounded down, remainder) of an index."""

    def looked_up(self, value: Scalar, extent: Index) -> Index:
        """Return a scalar, 0 <= value < extent, as an index."""

    def same(self, one: Index, other: Index, why: str) -> None:
        """Require that two sizes are equal; raise IllTypedError if they cannot be."""

    def repeats(self, size: Index, wanted: Index, why: str) -> bool:
        """Return whether a dim of size 1 is repeated to ``wanted``; raise IllTypedError unless size is 1 or wanted."""

    def quotient(self, extent: Index, by: Index, why: str) -> Index:
        """Return extent / by; raise IllTypedError if ``extent`` cannot be a multiple of ``by``."""

    def ordered(self, low: Index, high: Index, why: str) -> None:
        """Require low <= high; raise IllTypedError if that is impossible."""

    def floored(self, number: Index, by: Index) -> Index:
        """Return number / by, rounded down."""


Letter: TypeAlias = str
Monomial: TypeAlias = "tuple[Letter, ...]"

_DATA: dict[Letter, Any] = {}


class NotExpressibleError(Exception):
    """A value that cannot be written in letters, although it is a number for given sizes; so there is no proof."""


def data_letter(value: Any) -> Letter:
    """Return the letter that stands for an index that is data; ``value`` is the normal form of the tensor's element."""
    letter = f"@{value!r}"
    _DATA[letter] = value
    return letter


def data_value(letter: Letter) -> Any:
    """Return the ``value`` of a letter that `data_letter` made; None for any other letter."""
    return _DATA.get(letter) if letter[0] == "@" else None


@dataclass(frozen=True, slots=True)
class Inverse:
    """One divided by a symbolic number."""

    of: Polynomial


class Polynomial:
    """A polynomial in letters with whole coefficients, in canonical form. Immutable.

    ``terms`` has sorted (monomial, coefficient) pairs; a monomial is a sorted tuple of letters.
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        kept = [(monomial, factor) for monomial, factor in terms.items() if factor]
        kept.sort()
        self.terms = tuple(kept)
        self._hash = hash(self.terms)

    @staticmethod
    def of(number: int | Polynomial) -> Polynomial:
        """Return a number as a constant polynomial; a polynomial is returned as it is."""
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
        """The quotient; NotExpressibleError unless it is whole for all values of the letters."""
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
        """The polynomial's value if it has no letters; else None."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def single(self) -> Letter | None:
        """The letter if the polynomial is exactly one letter; else None."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def letters(self) -> Iterator[Letter]:
        """Yield all letters, possibly repeated."""
        for monomial, _ in self.terms:
            yield from monomial

    def factor_of(self, letter: Letter) -> Polynomial:
        """Return the coefficient of a letter, which may contain other letters.

        The result is meaningful only if the letter occurs only in the first power.
        """
        return Polynomial({_without(m, letter): c for m, c in self.terms if letter in m})

    def primitive(self) -> Polynomial:
        """Return the polynomial divided by the factors (number and letters) that all its terms have in common.

        If all letters are positive, both polynomials are 0 for the same values.
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
        """Return (quotient, rest) with self = quotient * divisor + rest, found term by term.

        The rest is the remainder of the division only if 0 <= rest < divisor is known. Returns None if ``divisor`` has
        not exactly one term.
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
