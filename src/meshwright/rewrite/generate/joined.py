"""Rules of several outputs: terms that are the parts of one.

Where ``slice(t, start, cut) = a`` and ``slice(t, cut, stop) = b`` are rules, a and b can both be had from t, computed
once: two products of one input are the halves of one product with both weights beside each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.rewrite.expressions import Call, Expression
from meshwright.rewrite.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def joined_rules(rules: Sequence[Rule]) -> Iterator[Rule]:
    """Rules of two outputs, from pairs of rules about the parts of one term."""
    firsts: dict[tuple[Expression, object, object], list[Rule]] = {}
    for rule in rules:
        cut = _cut(rule)
        if cut is not None and cut["start"] == 0:
            firsts.setdefault((_whole(rule), cut["axis"], cut["stop"]), []).append(rule)
    for rule in rules:
        cut = _cut(rule)
        if cut is None or cut["start"] == 0:
            continue
        for first in firsts.get((_whole(rule), cut["axis"], cut["start"]), ()):
            # Two tensors that are cut out of what they were put together of are no gain.
            calls = isinstance(first.right[0], Call) and isinstance(rule.right[0], Call)
            if calls and first.right != rule.right:
                yield Rule(
                    name=f"{first.name} and {rule.name}",
                    left=(first.right[0], rule.right[0]),
                    right=(first.left[0], rule.left[0]),
                    ranks=tuple(dict((*first.ranks, *rule.ranks)).items()),
                    source=first.source,
                )


def _cut(rule: Rule) -> dict[str, object] | None:
    """The attributes of the slice that a rule's left side is."""
    left = rule.left[0]
    if len(rule.left) > 1 or not isinstance(left, Call) or left.operator != "slice":
        return None
    return dict(left.attributes)


def _whole(rule: Rule) -> Expression:
    left = rule.left[0]
    assert isinstance(left, Call)
    return left.operands[0]
