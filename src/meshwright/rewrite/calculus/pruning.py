"""Simplify normal forms: remove guards (inequalities) that follow from others, and terms that are never present."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.rewrite.calculus.sums import (
    Applied,
    Atom,
    Binder,
    Branch,
    Largest,
    Product,
    Total,
    make_product,
    named_alike,
)
from meshwright.rewrite.calculus.whole import NO_GUARDS, Guards, Polynomial

if TYPE_CHECKING:
    from fractions import Fraction

    from meshwright.rewrite.calculus.facts import LetterBounds


def simplified(facts: LetterBounds, total: Total, given: Guards) -> Total:
    """Return a normal form simplified for where the guards ``given`` hold, with canonical names of bound letters."""
    return named_alike(_pruned(facts, total, given))


def _pruned(facts: LetterBounds, total: Total, given: Guards) -> Total:
    kept: dict[Product, Fraction] = {}
    for key, factor in total.items:
        for name, extent in key.binders:
            facts.declare(name, 0, extent)
        guards = _fewer(facts, key.guards, given)
        if guards is None:
            continue
        powers: dict[Atom, int] = {}
        for atom, power in key.powers:
            new = _pruned_atom(facts, atom, given | guards)
            powers[new] = powers.get(new, 0) + power
        new_key = make_product(key.binders, guards, powers)
        kept[new_key] = kept.get(new_key, 0) + factor
    return Total(kept)


def _pruned_atom(facts: LetterBounds, atom: Atom, given: Guards) -> Atom:
    if isinstance(atom, Applied):
        return Applied(atom.function, tuple(_pruned(facts, item, given) for item in atom.arguments))
    if not isinstance(atom, Largest):
        return atom
    branches = set()
    for branch in atom.branches:
        for name, extent in branch.binders:
            facts.declare(name, 0, extent)
        guards = _fewer(facts, branch.guards, given)
        if guards is None:
            continue
        value = _pruned(facts, branch.value, given | guards)
        bound = {name for name, _ in branch.binders}
        if bound and not bound & value.letters() and _is_met(facts, branch.binders, guards, given):
            branches.add(Branch((), NO_GUARDS, value))
        else:
            branches.add(Branch(branch.binders, guards, value))
    return Largest(frozenset(branches))


def _is_met(facts: LetterBounds, binders: tuple[Binder, ...], guards: Guards, given: Guards) -> bool:
    """Whether some values of the binders satisfy the guards, each about one binder, wherever ``given`` hold."""
    left = set(guards)
    for name, extent in binders:
        lows, highs = [Polynomial.of(0)], [extent - 1]
        for guard in guards:
            factor, rest = guard.factor_of(name), guard.substitute({name: Polynomial.of(0)})
            if factor == 1:
                lows.append(-rest)
            elif factor == -1:
                highs.append(rest)
            else:
                continue
            left.discard(guard)
        if any(set(number.letters()) & {other for other, _ in binders} for number in (*lows, *highs)):
            return False
        if not all(facts.implies(given, high - low) for low in lows for high in highs):
            return False
    return not left


def _fewer(facts: LetterBounds, guards: Guards, given: Guards) -> Guards | None:
    """The guards that do not follow from the given ones; None if they contradict them."""
    if not guards:
        return guards
    if not facts.possible(guards | given):
        return None
    left = set(guards)
    for guard in sorted(guards, key=repr):
        if facts.implies(given | (left - {guard}), guard):
            left.discard(guard)
    return frozenset(left)
