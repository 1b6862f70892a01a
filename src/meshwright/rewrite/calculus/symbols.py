"""`Symbols`: the arithmetic that runs definitions of operators on symbolic sizes and indices (letters), for proofs.

A scalar is a `Value`: a function by cases. Each case is a set of guards (inequalities) and a `Total` (normal form); the
cases are disjoint and cover all indices. If a definition requires two sizes to be equal, or divides an index, and the
result is not known, an exception names the letter to replace (`SizesDifferError`, `RefineError`); the caller replaces
the letter and runs the definition again. `summed` and `maximised` form the sum and the maximum over a letter.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from meshwright.rewrite.calculus.facts import MOST_QUESTIONS, LetterBounds
from meshwright.rewrite.calculus.functions import known_value
from meshwright.rewrite.calculus.pruning import simplified
from meshwright.rewrite.calculus.sums import (
    Applied,
    Branch,
    Largest,
    Product,
    Read,
    Sized,
    Total,
    every_letter,
    make_product,
    product_letters,
    substitute_product,
)
from meshwright.rewrite.calculus.whole import (
    NO_GUARDS,
    Guards,
    Inverse,
    Letter,
    NotExpressibleError,
    Polynomial,
    data_letter,
    data_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


Case: TypeAlias = "tuple[Guards, Total]"

LOWEST = Total.atom(Applied("lowest", ()))


def summed(facts: LetterBounds, letter: Letter, extent: Polynomial, cases: list[Case]) -> Total:
    """Return the sum over 0 <= letter < extent of a body that is given by cases.

    The guards of a case restrict the range of the letter in which the case counts.
    """
    result: dict[Product, Fraction] = {}
    for guards, total in cases:
        for key, factor in total.items:
            bound = _bind(facts, key, letter, extent, guards)
            for item, scale in () if bound is None else bound.items:
                result[item] = result.get(item, Fraction(0)) + factor * scale
    return Total(result)


def _bind(facts: LetterBounds, key: Product, letter: Letter, extent: Polynomial, guards: Guards) -> Total | None:
    """Σ over the letter of one product; None if no index satisfies the guards."""
    narrowed = _narrow(facts, letter, extent, key.guards | guards)
    if narrowed is None:
        return None
    first, extent, left = narrowed
    powers = dict(key.powers)
    plain = Product(key.binders, left, key.powers)
    if letter not in product_letters(plain):
        if extent.constant == 1:
            return Total({plain: Fraction(1)})
        return Total({plain: Fraction(1)}) * size_total(extent)
    if extent.constant == 1:
        return Total({substitute_product(plain, {letter: first}): Fraction(1)})
    place = facts.fresh("k", 0, extent)
    moved = substitute_product(make_product(key.binders, left, powers), {letter: place + first})
    new = place.single
    assert new is not None
    return Total({moved._replace(binders=(*moved.binders, (new, extent))): Fraction(1)})


def _narrow(
    facts: LetterBounds, letter: Letter, extent: Polynomial, guards: Guards
) -> tuple[Polynomial, Polynomial, Guards] | None:
    """(first, count, remaining guards) of the range of 0 <= letter < extent that guards on the letter allow."""
    if not facts.possible(guards):
        return None
    low, high = Polynomial.of(0), extent
    left = set()
    for guard in sorted(guards, key=repr):
        factor, rest = guard.factor_of(letter), guard.substitute({letter: Polynomial.of(0)})
        if facts.implies(NO_GUARDS, guard):
            continue
        if factor == 1 and _only_sizes(facts, rest) and _known_order(facts, low, -rest):
            low = -rest
        elif factor == -1 and _only_sizes(facts, rest) and _known_order(facts, rest + 1, high):
            high = rest + 1
        else:
            left.add(guard)
    count = high - low
    if not facts.implies(NO_GUARDS, count):
        return Polynomial.of(0), extent, frozenset(g for g in guards if not facts.implies(NO_GUARDS, g))
    if count == 0:
        return None
    return low, count, frozenset(left)


def _known_order(facts: LetterBounds, low: Polynomial, high: Polynomial) -> bool:
    return facts.implies(NO_GUARDS, high - low)


def _only_sizes(facts: LetterBounds, number: Polynomial) -> bool:
    return not any(letter[0] in "~@%" or facts.extent(letter) is not None for letter in number.letters())


def maximised(facts: LetterBounds, letter: Letter, extent: Polynomial, cases: list[Case]) -> Total:
    """Return the maximum over 0 <= letter < extent of a body that is given by cases."""
    branches = []
    for guards, total in cases:
        narrowed = _narrow(facts, letter, extent, guards)
        if narrowed is None or total == LOWEST:
            continue
        first, count, left = narrowed
        some = facts.implies(NO_GUARDS, count - 1)
        if letter not in total.letters() and not left and some:
            branches.append(Branch((), NO_GUARDS, total))
            continue
        place = facts.fresh("k", 0, count)
        new = place.single
        assert new is not None
        moved = total.substitute({letter: place + first})
        kept = frozenset(guard.substitute({letter: place + first}) for guard in left)
        branches.append(Branch(((new, count),), kept, moved))
    return largest_of(branches)


def size_total(extent: Polynomial) -> Total:
    """Return a symbolic size as a normal form, so that it can be added to and multiplied with elements."""
    result = Total({})
    for monomial, factor in extent.terms:
        term = Total.number(factor)
        for letter in monomial:
            term = term * Total.atom(Sized(Polynomial.letter(letter)))
        result = result + term
    return result


def largest_of(branches: list[Branch]) -> Total:
    """Return the maximum over branches as a normal form; nested maxima become one."""
    flat: set[Branch] = set()
    for branch in branches:
        inner = branch.value.only_atom
        if isinstance(inner, Largest):
            flat.update(
                Branch(branch.binders + each.binders, branch.guards | each.guards, each.value)
                for each in inner.branches
            )
        else:
            flat.add(branch)
    if len(flat) == 1:
        (only,) = flat
        if not only.binders and not only.guards:
            return only.value
    return Total.atom(Largest(frozenset(flat)))


Condition: TypeAlias = "tuple[Polynomial, ...]"

_MOST_TERMS = 4


class SizesDifferError(Exception):
    """Two sizes must be equal and are not known to be; ``or_one``: the first may be 1 instead (broadcasting)."""

    def __init__(self, one: Polynomial, other: Polynomial, why: str, *, or_one: bool = False) -> None:
        super().__init__(f"{why}: {one} and {other}")
        self.one, self.other, self.why, self.or_one = one, other, why, or_one


class RefineError(Exception):
    """An index is divided by ``by``: the letter must be replaced by ``outer * by + inner``.

    ``quotient`` is the number of values of ``outer``.
    """

    def __init__(self, letter: Letter, quotient: Polynomial, by: Polynomial) -> None:
        super().__init__(f"the index {letter} is divided by {by}")
        self.letter, self.quotient, self.by = letter, quotient, by


class Value:
    """A symbolic scalar by cases: (guards, normal form) pairs, disjoint and together exhaustive."""

    __slots__ = ("cases", "machine")

    def __init__(self, machine: Symbols, cases: Iterable[Case]) -> None:
        self.machine, self.cases = machine, tuple(cases)

    def __add__(self, other: Value) -> Value:
        return self.machine.combine(lambda one, two: one + two, self, other)

    def __sub__(self, other: Value) -> Value:
        return self.machine.combine(lambda one, two: one + two.scaled(-1), self, other)

    def __mul__(self, other: Value) -> Value:
        return self.machine.combine(lambda one, two: one * two, self, other)

    def __neg__(self) -> Value:
        return self.machine.combine(lambda one: one.scaled(-1), self)


class Symbols:
    """An `Arithmetic` on symbolic sizes and indices (letters).

    Only values of the same `Symbols` object can be compared. ``questions``: the most queries to z3.
    """

    def __init__(self, questions: int = MOST_QUESTIONS) -> None:
        self.facts = LetterBounds(questions)
        # Letters that a sum binds are renamed later: a quotient of one would keep the old name.
        self._bound: set[Letter] = set()
        # Letters that an attribute divides by: they are not 0 if the rule is well typed.
        self.inverted: set[Polynomial] = set()
        self._quotients: dict[tuple[Polynomial, Polynomial], Polynomial] = {}
        # Required orders that are to be proved later; None if they are required at once.
        self.owed: list[Polynomial] | None = None

    def read(self, tensor: str, shape: Sequence[Polynomial]) -> Callable[..., Value]:
        """Return a function from an index to the element of operand ``tensor``; a dim of size 1 has only index 0."""

        def at(*index: int | Polynomial) -> Value:
            places = [Polynomial.of(0 if size == 1 else place) for place, size in zip(index, shape, strict=True)]
            return self._plain(Total.atom(Read(tensor, tuple(places))))

        return at

    def index(self, size: Polynomial) -> Polynomial:
        """Return a new letter as the index of a dim of this size; 0 if the size is 1."""
        return Polynomial.of(0) if size == 1 else self.facts.fresh("i", 0, size)

    def total(self, extent: int | Polynomial, body: Callable[[Polynomial], Value]) -> Value:
        """Return the sum of ``body(k)`` over 0 <= k < extent; 2 to 4 terms are added one by one."""
        number = Polynomial.of(extent).constant
        if number is not None and 1 < number <= _MOST_TERMS:
            first, *others = (body(Polynomial.of(place)) for place in range(number))
            return sum(others, first)
        return self._closed(Polynomial.of(extent), body, partial(summed, self.facts), self.total)

    def largest(self, extent: int | Polynomial, body: Callable[[Polynomial], Value]) -> Value:
        """Return the largest ``body(k)`` over 0 <= k < extent."""
        return self._closed(Polynomial.of(extent), body, partial(maximised, self.facts), self.largest)

    def lowest(self) -> Value:
        """Return a value below all numbers."""
        return self._plain(LOWEST)

    def within(self, index: int | Polynomial, low: int | Polynomial, high: int | Polynomial) -> Condition:
        """Return the condition ``low <= index < high`` as two guards."""
        place = Polynomial.of(index)
        return (place - low, high - place - 1)

    def both(self, *conditions: Condition) -> Condition:
        """Return the condition that holds if all ``conditions`` hold."""
        return tuple(guard for condition in conditions for guard in condition)

    def choose(self, condition: Condition, then: Value, otherwise: Value) -> Value:
        """Return ``then`` where all guards of the condition hold, else ``otherwise``.

        ``otherwise`` gets one case per guard: the one in which that guard is the first that does not hold.
        """
        cases: list[Case] = []
        held: Guards = NO_GUARDS
        for guard in condition:
            if self.facts.implies(held, guard):
                continue
            cases += self._restricted(otherwise, held | {-guard - 1})
            held = held | {guard}
        return Value(self, (*cases, *self._restricted(then, held)))

    def select(self, truth: Value, then: Value, otherwise: Value) -> Value:
        """Return ``then`` where ``truth`` is 1, ``otherwise`` where it is 0."""
        return truth * then + (self.number(1) - truth) * otherwise

    def apply(self, function: str, *arguments: Value) -> Value:
        """Return the value of a function of `functions.FUNCTIONS`, simplified by its known properties."""
        if function == "maximum":
            return self.combine(lambda *each: largest_of([Branch((), NO_GUARDS, item) for item in each]), *arguments)
        if function == "reciprocal" and self.inverted:
            return self.combine(self._reciprocal, *arguments)
        return self.combine(lambda *each: known_value(function, each), *arguments)

    def _reciprocal(self, total: Total) -> Total:
        for number in self.inverted:
            if total == size_total(number):
                return self.inverse_size(number).cases[0][1]
        return known_value("reciprocal", (total,))

    def number(self, value: float | Fraction | Polynomial | Inverse) -> Value:
        """Return a number, a symbolic size, or the inverse of a size, as a scalar."""
        if isinstance(value, Inverse):
            self.inverted.add(value.of)
            return self.inverse_size(value.of)
        return self._plain(size_total(value) if isinstance(value, Polynomial) else Total.number(Fraction(value)))

    def inverse_size(self, extent: int | Polynomial) -> Value:
        """Return one divided by a size."""
        extent = Polynomial.of(extent)
        if extent.constant is not None:
            return self.number(Fraction(1, extent.constant))
        if len(extent.terms) > 1:
            return self._plain(Total.atom(Sized(extent), -1))
        ((monomial, factor),) = extent.terms
        result = Total.number(Fraction(1, factor))
        for letter in monomial:
            result = result * Total.atom(Sized(Polynomial.letter(letter)), -1)
        return self._plain(result)

    def divided(self, index: int | Polynomial, by: int | Polynomial) -> tuple[Polynomial, Polynomial]:
        """Return (quotient rounded down, remainder) of an index.

        Raises RefineError if a letter must be replaced first, NotExpressibleError if the quotient has no symbolic form.
        """
        index, by = Polynomial.of(index), Polynomial.of(by)
        if by == 1:
            return index, Polynomial.of(0)
        split = index.split_by(by)
        if split is not None and self._is_rest(split[1], by):
            return split
        if self._is_rest(index, by):
            return Polynomial.of(0), index
        letter = index.single
        extent = None if letter is None else self.facts.extent(letter)
        if letter is not None and extent is not None:
            whole = extent.split_by(by)
            if whole is not None and not whole[1].terms:
                raise RefineError(letter, whole[0], by)
        if any(item in self._bound or data_value(item) is not None for item in index.letters()):
            raise NotExpressibleError(f"the quotient of {index} by {by}")
        if not self.facts.implies(NO_GUARDS, index):
            raise NotExpressibleError(f"the quotient of {index}, which may be below 0, by {by}")
        quotient = self.facts.floored(index, by)
        return quotient, index - quotient * by

    def looked_up(self, value: Value, extent: int | Polynomial) -> Polynomial:
        """Return a scalar, 0 <= value < extent, as an index.

        Raises NotExpressibleError if the scalar has several cases or is also an index of a dim of another size.
        """
        if len(value.cases) != 1:
            raise NotExpressibleError("an index that is looked up has several cases")
        letter = data_letter(value.cases[0][1])
        known = self.facts.extent(letter)
        if known is not None and not self.facts.are_equal(known, Polynomial.of(extent)):
            # An index into fewer rows is one into more; the reverse may be out of range.
            raise NotExpressibleError(f"one index selects among {known} rows and among {extent} rows")
        return self.facts.declare(letter, 0, extent)

    def same(self, one: int | Polynomial, other: int | Polynomial, why: str) -> None:
        """Require that two sizes are equal; raise SizesDifferError if that is not known."""
        one, other = Polynomial.of(one), Polynomial.of(other)
        if one != other and not self.facts.are_equal(one, other):
            raise SizesDifferError(one, other, why)

    def repeats(self, size: int | Polynomial, wanted: int | Polynomial, why: str) -> bool:
        """Return whether a dim of size 1 is repeated to ``wanted``.

        Raises SizesDifferError if it is not known that the size is 1 or equal to ``wanted``.
        """
        size, wanted = Polynomial.of(size), Polynomial.of(wanted)
        if size == wanted:
            return False
        if size == 1:
            return True
        if not self.facts.are_equal(size, wanted):
            raise SizesDifferError(size, wanted, why, or_one=size.constant is None)
        return False

    def quotient(self, extent: int | Polynomial, by: int | Polynomial, why: str) -> Polynomial:
        """Return extent / by, possibly as a new letter; raise SizesDifferError if divisibility is not known."""
        extent, by = Polynomial.of(extent), Polynomial.of(by)
        if by == 1:
            return extent
        split = extent.split_by(by)
        if split is not None and not split[1].terms:
            return split[0]
        key = (extent, by)
        if key not in self._quotients:
            self._quotients[key] = self.facts.fresh("q", 1)
        if not self.facts.are_equal(extent, by * self._quotients[key]):
            raise SizesDifferError(extent, by * self._quotients[key], why)
        return self._quotients[key]

    def ordered(self, low: int | Polynomial, high: int | Polynomial, why: str) -> None:
        """Require low <= high.

        If that is not known, raise SizesDifferError for high = low + r with a new letter r >= 0. If ``owed`` is a list,
        add the requirement to it instead.
        """
        low, high = Polynomial.of(low), Polynomial.of(high)
        if self.owed is not None:
            self.owed.append(high - low)
        elif not self.facts.implies(NO_GUARDS, high - low):
            raise SizesDifferError(high, low + self.facts.fresh("r", 0), why)

    def floored(self, number: int | Polynomial, by: int | Polynomial) -> Polynomial:
        """Return number / by, rounded down, possibly as a new letter."""
        number, by = Polynomial.of(number), Polynomial.of(by)
        return number if by == 1 else self.facts.floored(number, by)

    def equal(self, one: Value, other: Value) -> tuple[Guards, Total] | None:
        """Return None if two scalars are proved equal in all cases.

        Else return (guards, difference) of the first case in which they are not.
        """
        for (given, left), (more, right) in product(one.cases, other.cases):
            guards = given | more
            if self.facts.possible(guards):
                difference = simplified(self.facts, left + right.scaled(-1), guards)
                if difference.items:
                    return guards, difference
        return None

    def combine(self, function: Callable[..., Total], *values: Value) -> Value:
        """Return the scalar that applies ``function`` to the normal forms of ``values`` in each common case."""
        cases: list[Case] = [(NO_GUARDS, Total.number(0))]
        chosen: list[tuple[Guards, tuple[Total, ...]]] = [(NO_GUARDS, ())]
        for value in values:
            chosen = [
                (given | guards, (*totals, total))
                for given, totals in chosen
                for guards, total in value.cases
                if not (given and guards) or given == guards or self.facts.possible(given | guards)
            ]
        cases = [(guards, function(*totals)) for guards, totals in chosen]
        return Value(self, cases)

    def _plain(self, total: Total) -> Value:
        return Value(self, ((NO_GUARDS, total),))

    def _restricted(self, value: Value, held: Guards) -> Iterator[Case]:
        for guards, total in value.cases:
            if self.facts.possible(guards | held):
                yield guards | held, total

    def _is_rest(self, number: Polynomial, by: Polynomial) -> bool:
        return self.facts.implies(NO_GUARDS, number) and self.facts.implies(NO_GUARDS, by - 1 - number)

    def _closed(
        self,
        extent: Polynomial,
        body: Callable[[Polynomial], Value],
        close: Callable[[Letter, Polynomial, list[Case]], Total],
        again: Callable[..., Value],
    ) -> Value:
        """Bind a letter over the cases of a body: guards on bound letters go inside, the others stay cases."""
        if extent == 1:
            return body(Polynomial.of(0))
        place = self.facts.fresh("k", 0, extent)
        letter = place.single
        assert letter is not None
        self._bound.add(letter)
        try:
            value = body(place)
        except RefineError as refine:
            if refine.letter != letter:
                raise
            quotient, by = refine.quotient, refine.by
            return again(quotient, lambda outer: again(by, lambda inner: body(outer * by + inner)))
        split = [self._bound_guards(guards) for guards, _ in value.cases]
        cases = []
        for held in self._worlds({guard for _, free in split for guard in free}):
            inside = [
                (bound, total) for (bound, free), (_, total) in zip(split, value.cases, strict=True) if free <= held
            ]
            cases.append((held, close(letter, extent, inside)))
        return Value(self, cases)

    def _bound_guards(self, guards: Guards) -> tuple[Guards, Guards]:
        """Guards on letters that a sum binds, this one or one around it, and the others."""
        bound = frozenset(guard for guard in guards if not self._bound.isdisjoint(every_letter(guard)))
        return bound, guards - bound

    def _worlds(self, guards: set[Polynomial]) -> list[Guards]:
        """All consistent ways in which guards hold or not."""
        worlds: list[Guards] = [NO_GUARDS]
        for guard in sorted(guards, key=repr):
            opposite = -guard - 1
            worlds = [
                world | {choice}
                for world in worlds
                if guard not in world and opposite not in world
                for choice in (guard, opposite)
                if self.facts.possible(world | {choice})
            ] + [world for world in worlds if guard in world or opposite in world]
        return worlds
