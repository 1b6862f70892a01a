"""The rules of a search, grouped by how they are applied (`Guided`).

Each rule can be read in two directions. Directions that reduce the work (`Guided.simplify`) are applied until nothing
new appears. Directions with equal or more work (`explore`) are applied for a few rounds only, because a rule may apply
to its own result. Laws that only reorder sums and products, such as associativity, would give too many orders to
enumerate; they are applied only where they make a subexpression constant (`fold`, constant folding). Rules of two
outputs join operators that read one tensor (`merge`, see `search.merging`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from meshwright.rewrite.expressions import Call, Expression, Name
from meshwright.rewrite.matching import Directed, directions
from meshwright.rewrite.rulebook import BookRule, shipped_rule_book
from meshwright.rewrite.search.merging import joins

if TYPE_CHECKING:
    from collections.abc import Iterable


# What must be preserved of NaN and infinity: everything; whether a number is finite; nothing.
SpecialNumbers = Literal["same", "kept", "ignored"]

# Rough work of an operator, independent of sizes. Views do no work.
_FREE = frozenset({"slice", "reshape", "transpose", "broadcast", "full", "bitcast"})
# For numbers that are not finite, torch's result differs from the definition.
_FUSED = frozenset({"attention", "softmax", "gelu", "gelu_tanh", "silu", "layer_norm", "rms_norm"})
_ORDERED = frozenset({"add", "sub", "mul", "neg", "maximum", "minimum"})
_HEAVY = frozenset({"matmul", "linear", "conv1d", "conv2d", "attention", "embedding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided:
    """Directed rules, grouped by use: see the module's description."""

    simplify: tuple[Directed, ...]
    explore: tuple[Directed, ...]
    merge: tuple[Directed, ...]
    fold: tuple[Directed, ...] = ()

    def joined(self, other: Guided) -> Guided:
        """Return the directed rules of both, group by group."""
        return Guided(
            simplify=(*self.simplify, *other.simplify),
            explore=(*self.explore, *other.explore),
            merge=(*self.merge, *other.merge),
            fold=(*self.fold, *other.fold),
        )


@cache
def shipped_rules(special: SpecialNumbers = "kept") -> Guided:
    """Return the shipped rules: those for torch's kernels, XLA's, and the basis of the generated rules.

    ``special``: which effect of a rule on NaN and infinity is allowed, as in `guide`.
    """
    own = guide(shipped_rule_book("torch").rules, special)
    others = guide((*shipped_rule_book("xla").rules, *shipped_rule_book().basis), special)
    explore, fold = list(own.explore), list(own.fold)
    for way in others.explore:
        if _commutes(way):
            explore.append(way)
        else:
            fold.append(replace(way, folds=True))
    return Guided(
        simplify=(*own.simplify, *others.simplify),
        explore=tuple(explore),
        merge=(*own.merge, *others.merge),
        fold=(*fold, *others.fold),
    )


def guide(entries: Iterable[BookRule], special: SpecialNumbers = "kept") -> Guided:
    """Return the directions of rules in groups, without duplicates.

    ``special`` limits the effect on NaN and infinity. "same": no effect, unless the tensors are known to be finite.
    "kept": non-finite results stay non-finite. "ignored": any effect. A rule without ``ranks`` is used at all ranks.
    """
    simplify, explore, merge, fold = [], [], [], []
    seen = set()
    for entry in entries:
        lost, changed = entry.special.lost, entry.special.changed
        finite = {"same": (*lost, *changed), "kept": lost, "ignored": ()}[special]
        if special == "same" and any(_operators(side) & _FUSED for side in (*entry.rule.left, *entry.rule.right)):
            finite = tuple(entry.rule.names)
        # An unproved rule is used at all ranks.
        proved = frozenset(tuple(sorted(zip(entry.rule.names, each, strict=True))) for each in entry.ranks)
        ranks = proved or None
        for way in directions(entry.rule, ranks, finite):
            text = (way.sources, way.targets, entry.rule.when)
            if text in seen:
                continue
            seen.add(text)
            if len(way.sources) > 1:
                if joins(way):
                    merge.append(way)
            elif _work(way.targets[0]) < _work(way.sources[0]):
                simplify.append(way)
            elif _reorders(way) and not _commutes(way):
                fold.append(replace(way, general=True, folds=True))
            else:
                explore.append(replace(way, general=True))
    return Guided(simplify=tuple(simplify), explore=tuple(explore), merge=tuple(merge), fold=tuple(fold))


def _commutes(way: Directed) -> bool:
    source, target = way.sources[0], way.targets[0]
    return (
        isinstance(source, Call)
        and isinstance(target, Call)
        and source.operator == target.operator
        and len(source.operands) == 2
        and source.operands == target.operands[::-1]
    )


def _reorders(way: Directed) -> bool:
    """Whether it only reorders sums or products of numbers."""
    return all(_operators(side) <= _ORDERED for side in (*way.sources, *way.targets))


def _operators(side: Expression) -> set[str]:
    if isinstance(side, Name):
        return set()
    return {side.operator}.union(*map(_operators, side.operands))


def _work(side: Expression) -> tuple[int, int]:
    """(work, number of operators)."""
    if isinstance(side, Name):
        return 0, 0
    inner = [_work(operand) for operand in side.operands]
    own = 0 if side.operator in _FREE else 10 if side.operator in _HEAVY else 1
    return own + sum(work for work, _ in inner), 1 + sum(count for _, count in inner)
