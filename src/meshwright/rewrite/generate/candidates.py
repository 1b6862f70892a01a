"""From equal terms to candidates: one for all renamings, commutations and shapes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.rewrite.rules import Rule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from meshwright.rewrite.generate.enumerate import Enumeration

# A term in prefix order: numbers of steps, with given tensors below 0.
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RuleCandidate:
    """Two terms that were equal at all tested sizes; ``size``: their number of operators."""

    left: int
    right: int
    size: tuple[int, int]


def unique_candidates(found: Enumeration, holds: NDArray[np.bool_]) -> list[RuleCandidate]:
    """Candidates among the pairs that hold, small ones first.

    Left out are pairs that differ only in names, order of commuting operands, or shapes; pairs whose right side has a
    tensor that the left lacks; and pairs that follow from another one by using one tensor for several.
    """
    writer = _Writer(found)
    groups: dict[tuple[Tokens, Tokens], dict[Tokens, RuleCandidate]] = defaultdict(dict)
    for left, right in found.pairs[holds].tolist():
        sides = writer.named(left, right)
        if sides is None:
            continue
        one, two = sides
        skeleton = tuple(max(t, -1) for t in one), tuple(max(t, -1) for t in two)
        naming = tuple(t for t in (*one, *two) if t < 0)
        size = sum(t >= 0 for t in one), sum(t >= 0 for t in two)
        groups[skeleton].setdefault(naming, RuleCandidate(left, right, size))
    kept: list[RuleCandidate] = []
    for namings in groups.values():
        general: list[Tokens] = []
        for naming in sorted(namings, key=lambda names: -len(set(names))):
            if not any(_is_instance(other, naming) for other in general):
                general.append(naming)
                kept.append(namings[naming])
    return sorted(kept, key=lambda c: (sum(c.size), c.size, c.left))


def rule_of_candidate(found: Enumeration, candidate: RuleCandidate, name: str) -> Rule:
    """The candidate as a rule, with the ranks of its tensors."""
    left, right = found.expression(candidate.left), found.expression(candidate.right)
    rule = Rule(name=name, left=(left,), right=(right,), source="generated")
    ranks = tuple((tensor, len(found.domain.shape(tensor))) for tensor in rule.names)
    return Rule(name=name, left=(left,), right=(right,), ranks=ranks, source="generated")


class _Writer:
    """Writes terms as tokens, operands that commute in a fixed order."""

    def __init__(self, found: Enumeration) -> None:
        self._found = found
        self._known: dict[int, Tokens] = {}

    def named(self, left: int, right: int) -> tuple[Tokens, Tokens] | None:
        """Both sides with tensors numbered by first use; None if the right has one that the left lacks."""
        one, two = self._tokens(left), self._tokens(right)
        names: dict[int, int] = {}
        renamed = tuple(t if t >= 0 else names.setdefault(t, -1 - len(names)) for t in one)
        if any(t < 0 and t not in names for t in two):
            return None
        return renamed, tuple(t if t >= 0 else names[t] for t in two)

    def _tokens(self, term: int) -> Tokens:
        known = self._known.get(term)
        if known is not None:
            return known
        found = self._found
        step = int(found.steps[term])
        if step < 0:
            tokens: Tokens = (-1 - int(found.first[term]),)
        else:
            chosen = found.domain.steps[step]
            parts = [self._tokens(int(found.first[term]))]
            if chosen.num_operands == 2:
                parts.append(self._tokens(int(found.second[term])))
                if chosen.commutes:
                    parts.sort(key=lambda part: tuple(max(t, -1) for t in part))
            tokens = (step, *(t for part in parts for t in part))
        self._known[term] = tokens
        return tokens


def _is_instance(general: Tokens, special: Tokens) -> bool:
    named: dict[int, int] = {}
    return all(named.setdefault(one, two) == two for one, two in zip(general, special, strict=True))
