"""Meanings of a size in an attribute: any value, or a size of one of the tensors.

An enumerated term cuts a tensor at ``m``, because some tensor has m rows. The rule behind an equality may hold for
every position of the cut, or only for the rows of one of its tensors; both are tried, and the first that is proved is
taken.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.expressions import Call, Formula, Name, letters_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.rewrite.expressions import Attribute, Expression
    from meshwright.rewrite.generate.domain import Domain
    from meshwright.rewrite.rules import Rule

# Attributes that are equal in all convolutions and pools of a rule, and may then have any value.
_WINDOWS = ("stride", "padding", "dilation", "kernel", "groups", "low", "high")
_MOST_READINGS = 40


def readings(rule: Rule, domain: Domain) -> Iterator[Rule]:
    """The rule with sizes, windows and shapes of attributes replaced, general readings first."""
    found = [part for side in (*rule.left, *rule.right) for part in _attributes(side)]
    slots = list(dict.fromkeys(found))
    options = [list(_options(name, value, rule, domain, slots)) for name, value in slots]
    for number, chosen in enumerate(product(*options)):
        if number == _MOST_READINGS:
            break
        values = dict(zip(slots, chosen, strict=True))
        sides = [tuple(_replaced(side, values) for side in sides) for sides in (rule.left, rule.right)]
        bound, used = ({letter for side in part for _, letter in letters_of(side)} for part in sides)
        if used <= bound:
            yield replace(rule, left=sides[0], right=sides[1])


def _options(
    name: str, value: Attribute, rule: Rule, domain: Domain, slots: list[tuple[str, Attribute]]
) -> Iterator[Attribute]:
    place = slots.index((name, value))
    if name in _WINDOWS:
        yield Formula("", (f"{name}{place}",)) if name != "groups" else value
        if name != "groups":
            yield value
    elif name == "shape":
        yield Formula("", (f"shape{place}",))
        for tensor in rule.names:
            if domain.shape(tensor) == _numbers(value, domain):
                yield Formula("shape", (Formula("", (tensor,)),))
    elif name in ("start", "stop") and not isinstance(value, int):
        yield Formula("", (f"cut{_cut(value, slots)}",))
        yield from _sizes(value, rule, domain)
    else:
        yield value


def _cut(value: Attribute, slots: list[tuple[str, Attribute]]) -> int:
    """Equal cut positions are one letter, whether something starts or stops there."""
    return next(i for i, (name, held) in enumerate(slots) if name in ("start", "stop") and held == value)


def _sizes(value: Attribute, rule: Rule, domain: Domain) -> Iterator[Attribute]:
    if isinstance(value, Formula) and value.function == "+":
        for one, two in product(*(list(_sizes(part, rule, domain)) for part in value.arguments)):
            yield Formula("+", (one, two))
        return
    shapes = dict(domain.tensors)
    for tensor in rule.names:
        for dim, size in enumerate(shapes[tensor]):
            if isinstance(value, Formula) and not value.function and size == value.arguments[0]:
                yield Formula("size", (Formula("", (tensor,)), dim))


def _numbers(value: Attribute, domain: Domain) -> Any:
    return value_of(value, {}, dict(domain.sizes))


def _attributes(side: Expression) -> Iterator[tuple[str, Attribute]]:
    if isinstance(side, Name):
        return
    for operand in side.operands:
        yield from _attributes(operand)
    yield from side.attributes


def _replaced(side: Expression, values: dict[tuple[str, Attribute], Attribute]) -> Expression:
    if isinstance(side, Name):
        return side
    operands = tuple(_replaced(operand, values) for operand in side.operands)
    return Call(side.operator, operands, tuple((name, values[name, value]) for name, value in side.attributes))
