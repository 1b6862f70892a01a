"""Bind a letter over the cases of a body: its sum, its maximum, and the range that guards allow for it."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from meshwright.rewrite.calculus.facts import NO_GUARDS, Guards
from meshwright.rewrite.calculus.sums import (
    Applied,
    Branch,
    Largest,
    Product,
    Sized,
    Total,
    make_product,
    product_letters,
    substitute_product,
)
from meshwright.rewrite.calculus.whole import Polynomial

if TYPE_CHECKING:
    from meshwright.rewrite.calculus.facts import LetterBounds
    from meshwright.rewrite.calculus.whole import Letter

Case: TypeAlias = "tuple[Guards, Total]"

LOWEST = Total.atom(Applied("lowest", ()))


def summed(facts: LetterBounds, letter: Letter, extent: Polynomial, cases: list[Case]) -> Total:
    """The sum over 0 <= letter < extent."""
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
    """The largest over 0 <= letter < extent."""
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
    """A size as a number."""
    result = Total({})
    for monomial, factor in extent.terms:
        term = Total.number(factor)
        for letter in monomial:
            term = term * Total.atom(Sized(Polynomial.letter(letter)))
        result = result + term
    return result


def largest_of(branches: list[Branch]) -> Total:
    """The maximum over branches; nested maxima are flattened."""
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
