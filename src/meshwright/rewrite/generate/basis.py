"""A basis: a small subset of the true rules from which the others follow.

Rules are taken in order of size. Both sides of many rules are put into one e-graph, which the current basis saturates;
the first rule whose sides are not found equal joins the basis, and saturation continues. Sides found equal are derived
from proved rules, and so proved, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.rewrite.egraph import EGraph
from meshwright.rewrite.expressions import Name, value_of
from meshwright.rewrite.matching import directions
from meshwright.rewrite.rules import rule_of
from meshwright.rewrite.saturate import SaturationLimits, saturate
from meshwright.rewrite.terms import INPUT, TensorType, TermNode
from meshwright.spec import EventSink, NullSink

if TYPE_CHECKING:
    from meshwright.rewrite.expressions import Expression
    from meshwright.rewrite.generate.candidates import RuleCandidate
    from meshwright.rewrite.generate.domain import Domain
    from meshwright.rewrite.generate.enumerate import Enumeration
    from meshwright.rewrite.rules import Rule

_TOGETHER = 60
# No time limit, so that every machine finds the same rules.
_SHORT = SaturationLimits(rounds=3, nodes=60_000, seconds=600.0, matches=20_000)
_LIMITS = SaturationLimits(rounds=4, nodes=60_000, seconds=600.0, matches=20_000)


@dataclass(frozen=True, slots=True)
class Proved:
    """A candidate and its proved rule."""

    candidate: RuleCandidate
    rule: Rule


def find_basis(
    found: Enumeration, proved: Sequence[Proved], events: EventSink | None = None
) -> tuple[list[Proved], list[Proved]]:
    """(the basis, the rules that follow from it)."""
    sink = events or NullSink()
    basis: list[Proved] = []
    derived: list[Proved] = []
    rules = [way for rule in commuting(found.domain) for way in directions(rule)]
    for start in range(0, len(proved), _TOGETHER):
        waiting = list(proved[start : start + _TOGETHER])
        graph = EGraph()
        sides = {id(item): _sides(graph, found, item.candidate) for item in waiting}
        saturate(graph, rules, _LIMITS)
        while waiting:
            left = [item for item in waiting if graph.find(sides[id(item)][0]) != graph.find(sides[id(item)][1])]
            derived += [item for item in waiting if not any(item is other for other in left)]
            waiting = left
            if waiting:
                first = waiting.pop(0)
                basis.append(first)
                added = directions(first.rule)
                rules += added
                graph.merge(*sides[id(first)])
                graph.rebuild()
                saturate(graph, added, _LIMITS)
        sink.progress("find a basis", min(start + _TOGETHER, len(proved)), len(proved))
    return basis, derived


def follows(found: Enumeration, candidates: Sequence[RuleCandidate], rules: Sequence[Rule]) -> list[bool]:
    """By candidate, whether an e-graph shows that it follows from rules."""
    ways = [way for rule in rules for way in directions(rule)]
    answers = []
    for start in range(0, len(candidates), _TOGETHER):
        graph = EGraph()
        sides = [_sides(graph, found, item) for item in candidates[start : start + _TOGETHER]]
        saturate(graph, ways, _SHORT)
        answers += [graph.find(one) == graph.find(two) for one, two in sides]
    return answers


def commuting(domain: Domain) -> list[Rule]:
    """The commutativity rules of operators: terms are enumerated with operands in one order."""
    return [
        rule_of(f"{step.operator} commutes", f"{step.operator}(x, y)", f"{step.operator}(y, x)", source="enumeration")
        for step in domain.steps
        if step.commutes
    ]


def _sides(graph: EGraph, found: Enumeration, candidate: RuleCandidate) -> tuple[int, int]:
    sizes = dict(found.domain.sizes)

    def build(side: Expression) -> int:
        if isinstance(side, Name):
            type_ = TensorType(found.domain.shape(side.name), "float32")
            return graph.add(TermNode(INPUT, (), (("name", side.name), ("kind", "batch"))), type_)
        operands = tuple(map(build, side.operands))
        attributes = tuple((name, value_of(value, {}, sizes)) for name, value in side.attributes)
        return graph.add(TermNode(side.operator, operands, attributes))

    return build(found.expression(candidate.left)), build(found.expression(candidate.right))
