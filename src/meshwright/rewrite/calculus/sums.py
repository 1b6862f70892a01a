"""The normal form of one element of a tensor: a sum of products under summation signs (`Total`).

    total    = Σ factor · product
    product  = Σ over binders, where guards hold, of Π atom^power
    atom     = an operand's element | a function of totals | the largest of totals | a size as a number

A binder is a summation index (a bound letter) with its range; a guard is an inequality. Products are multiplied out, so
ring laws (distributivity, associativity, commutativity, exchange of summation signs) need no search: both sides of a
law have the same form once bound letters have canonical names (`named_alike`).
"""

from __future__ import annotations

from fractions import Fraction
from itertools import count, permutations, product
from math import factorial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from meshwright.rewrite.calculus.whole import Guards, Letter, Polynomial, data_letter, data_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_MOST_ORDERS = 720
_MOST_PRODUCTS = 4096
_names = count()


class TooLargeError(Exception):
    """A normal form has more products than are allowed (4096)."""


class Read(NamedTuple):
    """The element of an operand at an index; ``place`` has one polynomial per dim."""

    tensor: str
    place: tuple[Polynomial, ...]


class Applied(NamedTuple):
    """A function of normal forms that its known properties do not simplify further."""

    function: str
    arguments: tuple[Total, ...]


class Branch(NamedTuple):
    """One branch of a maximum: a normal form for all values of the binders at which the guards hold."""

    binders: tuple[Binder, ...]
    guards: Guards
    value: Total


class Largest(NamedTuple):
    """The maximum over all branches, and over all values of their binders."""

    branches: frozenset[Branch]


class Sized(NamedTuple):
    """A symbolic size used as a number."""

    number: Polynomial


Atom: TypeAlias = "Read | Applied | Largest | Sized"
Binder: TypeAlias = "tuple[Letter, Polynomial]"


class Product(NamedTuple):
    """A product of atoms, summed over binders (letter, extent) where all guards hold; ``powers``: (atom, exponent)."""

    binders: tuple[Binder, ...]
    guards: Guards
    powers: tuple[tuple[Atom, int], ...]


ONE = Product((), frozenset(), ())


class Total:
    """A normal form: ``items`` has (product, rational factor) pairs. Immutable.

    Two totals are equal if they have the same items; apply `named_alike` before a comparison.
    """

    __slots__ = ("_hash", "items")

    def __init__(self, factors: Mapping[Product, Fraction]) -> None:
        self.items = frozenset((key, factor) for key, factor in factors.items() if factor)
        self._hash = hash(self.items)
        if len(self.items) > _MOST_PRODUCTS:
            raise TooLargeError

    @staticmethod
    def number(value: int | Fraction) -> Total:
        """Return a constant as a normal form."""
        return Total({ONE: Fraction(value)})

    @staticmethod
    def atom(atom: Atom, power: int = 1) -> Total:
        """Return the normal form of a power of one atom."""
        return Total({Product((), frozenset(), ((atom, power),)): Fraction(1)})

    @property
    def constant(self) -> Fraction | None:
        """The number if the normal form is constant; else None."""
        if not self.items:
            return Fraction(0)
        ((key, factor), *rest) = self.items
        return factor if not rest and key == ONE else None

    @property
    def only_atom(self) -> Atom | None:
        """The atom if the normal form is exactly one atom; else None."""
        if len(self.items) != 1:
            return None
        ((key, factor),) = self.items
        plain = factor == 1 and not key.binders and not key.guards and len(key.powers) == 1 and key.powers[0][1] == 1
        return key.powers[0][0] if plain else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Total) and self.items == other.items

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return " + ".join(sorted(_multiple_text(key, factor) for key, factor in self.items)) or "0"

    def __add__(self, other: Total) -> Total:
        sums = dict(self.items)
        for key, factor in other.items:
            sums[key] = sums.get(key, Fraction(0)) + factor
        return Total(sums)

    def __mul__(self, other: Total) -> Total:
        products: dict[Product, Fraction] = {}
        if len(self.items) * len(other.items) > _MOST_PRODUCTS:
            raise TooLargeError
        for (left, a), (right, b) in product(self.items, other.items):
            key = _times(left, right)
            products[key] = products.get(key, Fraction(0)) + a * b
        return Total(products)

    def scaled(self, factor: Fraction | int) -> Total:
        """Return the normal form times a number."""
        return Total({key: old * factor for key, old in self.items})

    def letters(self) -> set[Letter]:
        """Return all letters of the normal form, free or bound."""
        return {letter for key, _ in self.items for letter in product_letters(key)}

    def substitute(self, values: Mapping[Letter, Polynomial]) -> Total:
        """Return the normal form with free letters replaced; ``values`` must not contain letters that it binds."""
        changed: dict[Product, Fraction] = {}
        for key, factor in self.items:
            new = substitute_product(key, values)
            changed[new] = changed.get(new, Fraction(0)) + factor
        return Total(changed)


def every_letter(number: Polynomial) -> set[Letter]:
    """Return all letters of a polynomial, including those inside data-dependent indices (`data_letter`)."""
    found = set(number.letters())
    for letter in tuple(found):
        value = data_value(letter)
        if value is not None:
            found |= value.letters()
    return found


def make_product(binders: tuple[Binder, ...], guards: Guards, powers: Mapping[Atom, int]) -> Product:
    """Return a product with sorted powers and without exponents of 0."""
    kept = sorted(((atom, power) for atom, power in powers.items() if power), key=lambda item: _atom_text(item[0]))
    return Product(binders, guards, tuple(kept))


def product_letters(key: Product) -> set[Letter]:
    """Return all letters of a product, free or bound, including those inside data-dependent indices."""
    found = {letter for name, extent in key.binders for letter in (name, *extent.letters())}
    for guard in key.guards:
        found.update(guard.letters())
    for atom, _ in key.powers:
        found |= _atom_letters(atom)
    for letter in tuple(found):
        value = data_value(letter)
        if value is not None:
            found |= value.letters()
    return found


def substitute_product(key: Product, values: Mapping[Letter, Polynomial]) -> Product:
    """Return a product with letters replaced; a bound letter may be replaced only by another letter."""
    powers: dict[Atom, int] = {}
    for atom, power in key.powers:
        new = _substitute_atom(atom, values)
        powers[new] = powers.get(new, 0) + power
    return make_product(
        tuple(_substitute_binder(binder, values) for binder in key.binders),
        frozenset(_in_number(guard, values) for guard in key.guards),
        powers,
    )


def fresh_binders(binders: tuple[Binder, ...]) -> dict[Letter, Polynomial]:
    """Return a new letter for each bound letter, as values for a substitution."""
    return {name: Polynomial.letter(f"~{next(_names)}") for name, _ in binders}


def named_alike(total: Total, depth: int = 0) -> Total:
    """Return a normal form with canonical names of bound letters, so that equal normal forms compare equal.

    ``depth``: the nesting depth, which is part of the names.
    """
    named: dict[Product, Fraction] = {}
    for key, factor in total.items:
        new = _named(key, depth)
        named[new] = named.get(new, Fraction(0)) + factor
    return Total(named)


def _named(key: Product, depth: int) -> Product:
    if not key.binders:
        return _inner_named(key, depth + 1)
    candidates = []
    for order in _orders(key):
        names = {name: Polynomial.letter(f"%{depth}.{place}") for place, name in enumerate(order)}
        renamed = _inner_named(substitute_product(key, names), depth + 1)
        candidates.append(renamed._replace(binders=tuple(sorted(renamed.binders, key=repr))))
    return min(candidates, key=_product_text)


def _orders(key: Product) -> Iterator[tuple[Letter, ...]]:
    """Orders of the binders worth trying: by how each occurs; binders that occur equally, in all orders."""
    alike: dict[str, list[Letter]] = {}
    for name, extent in key.binders:
        marks = {other: Polynomial.letter("*" if other == name else "?") for other, _ in key.binders}
        marked = _inner_named(substitute_product(key, marks), 99)._replace(binders=())
        alike.setdefault(f"{extent}|{_product_text(marked)}", []).append(name)
    groups = [alike[text] for text in sorted(alike)]
    num_orders = 1
    for group in groups:
        num_orders *= factorial(len(group))
    if num_orders > _MOST_ORDERS:
        yield tuple(name for group in groups for name in group)
        return
    for chosen in product(*(permutations(group) for group in groups)):
        yield tuple(name for group in chosen for name in group)


def _inner_named(key: Product, depth: int) -> Product:
    powers: dict[Atom, int] = {}
    for atom, power in key.powers:
        new = _name_atom(atom, depth)
        powers[new] = powers.get(new, 0) + power
    return make_product(key.binders, key.guards, powers)


def _name_atom(atom: Atom, depth: int) -> Atom:
    if isinstance(atom, Applied):
        return Applied(atom.function, tuple(named_alike(item, depth) for item in atom.arguments))
    if isinstance(atom, Largest):
        return Largest(frozenset(_name_branch(branch, depth) for branch in atom.branches))
    return atom


def _name_branch(branch: Branch, depth: int) -> Branch:
    # A branch is named like a product whose only atom is its value.
    key = Product(branch.binders, branch.guards, ((Applied("", (branch.value,)), 1),))
    named = _named(key, depth)
    (held, _) = named.powers[0]
    assert isinstance(held, Applied)
    return Branch(named.binders, named.guards, held.arguments[0])


def _times(left: Product, right: Product) -> Product:
    if left.binders and right.binders and {name for name, _ in left.binders} & {name for name, _ in right.binders}:
        right = substitute_product(right, fresh_binders(right.binders))
    powers = dict(left.powers)
    for atom, power in right.powers:
        powers[atom] = powers.get(atom, 0) + power
    return make_product(left.binders + right.binders, left.guards | right.guards, powers)


def _substitute_binder(binder: Binder, values: Mapping[Letter, Polynomial]) -> Binder:
    name, extent = binder
    renamed = values[name].single if name in values else name
    assert renamed is not None, "a binder is renamed, never given a value"
    return renamed, _in_number(extent, values)


def _substitute_atom(atom: Atom, values: Mapping[Letter, Polynomial]) -> Atom:
    if isinstance(atom, Read):
        return Read(atom.tensor, tuple(_in_number(number, values) for number in atom.place))
    if isinstance(atom, Applied):
        return Applied(atom.function, tuple(item.substitute(values) for item in atom.arguments))
    if isinstance(atom, Sized):
        return Sized(_in_number(atom.number, values))
    return Largest(
        frozenset(
            Branch(
                tuple(_substitute_binder(binder, values) for binder in branch.binders),
                frozenset(_in_number(guard, values) for guard in branch.guards),
                branch.value.substitute(values),
            )
            for branch in atom.branches
        )
    )


def _in_number(number: Polynomial, values: Mapping[Letter, Polynomial]) -> Polynomial:
    """Replace letters of a number, also inside of data-dependent indices."""
    inner = {}
    for letter in number.letters():
        value = data_value(letter)
        if value is not None:
            inner[letter] = Polynomial.letter(data_letter(value.substitute(values)))
    return number.substitute({**values, **inner} if inner else values)


def _atom_letters(atom: Atom) -> set[Letter]:
    if isinstance(atom, Read):
        return {letter for number in atom.place for letter in number.letters()}
    if isinstance(atom, Applied):
        return {letter for item in atom.arguments for letter in item.letters()}
    if isinstance(atom, Sized):
        return set(atom.number.letters())
    found: set[Letter] = set()
    for branch in atom.branches:
        found |= branch.value.letters() | {letter for guard in branch.guards for letter in guard.letters()}
        found |= {letter for name, extent in branch.binders for letter in (name, *extent.letters())}
    return found


def _multiple_text(key: Product, factor: Fraction) -> str:
    if factor == 1:
        return _product_text(key)
    if not key.powers and not key.binders and not key.guards:
        return str(factor)
    return f"{factor} {_product_text(key)}"


def _product_text(key: Product) -> str:
    binders = ", ".join(f"{name} < {extent}" for name, extent in key.binders)
    guards = " ".join(sorted(f"[{guard} ≥ 0]" for guard in key.guards))
    atoms = " ".join(f"{_atom_text(atom)}^{power}" if power != 1 else _atom_text(atom) for atom, power in key.powers)
    return " ".join([*([f"Σ({binders})"] if binders else []), *([guards] if guards else []), atoms or "1"])


def _atom_text(atom: Atom) -> str:
    if isinstance(atom, Read):
        return f"{atom.tensor}[{', '.join(map(str, atom.place))}]"
    if isinstance(atom, Applied):
        return f"{atom.function}({', '.join(map(repr, atom.arguments))})"
    if isinstance(atom, Sized):
        return f"({atom.number})"
    texts = sorted(_product_text(Product(b.binders, b.guards, ((Applied("", (b.value,)), 1),))) for b in atom.branches)
    return f"max({', '.join(texts)})"
