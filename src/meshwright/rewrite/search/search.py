"""`search`: a cheaper graph of the same outputs, among all that rules lead to.

Rules fill an e-graph (`grow`), the one cost model prices what is in it, and HiGHS chooses (`extraction`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshwright.rewrite.saturate import Limits, saturate
from meshwright.rewrite.search.extraction import extract, smallest
from meshwright.rewrite.search.loading import find_known, is_token, load
from meshwright.rewrite.search.merging import Merging
from meshwright.rewrite.search.pricing import FREE, call_of
from meshwright.rewrite.terms import Node, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.search.loading import Known
    from meshwright.rewrite.search.pricing import Call, CallPrices
    from meshwright.rewrite.search.ruleset import Guided

Ended = Literal["saturated", "rounds", "nodes", "seconds"]

# Operators that one chain of merges may join.
_MOST_MEMBERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """How an e-graph grew: ``ended`` says why it stopped, ``cut`` which rules fitted at too many places."""

    rounds: int
    ended: Ended
    num_nodes: int
    cut: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A graph of the same outputs. ``before_s`` and ``after_s`` are predicted; ``proved``: none is cheaper.

    ``rules``: those that made what was chosen, with how many nodes. ``choice``: its nodes by class of the e-graph.
    """

    terms: Terms
    effects: int | None
    before_s: float
    after_s: float
    proved: bool
    grown: Grown
    rules: Mapping[str, int]
    choice: Mapping[int, Node]


class CircularError(Exception):
    """A choice in which something needs itself."""


class Space:
    """All graphs that rules lead to, from one; priced, ready to choose from."""

    def __init__(self, terms: Terms, effects: int | None, *, frozen: bool, finite: Set[str] = frozenset()) -> None:
        self._terms, self._effects, self._frozen = terms, effects, frozen
        self._roots = (*terms.outputs, *(() if effects is None else (effects,)))
        self.graph, self._classes = load(terms, self._roots, finite, frozen=frozen)
        self.known: Known = find_known(self.graph, frozen=frozen)

    def grow(self, rules: Guided, limits: Limits) -> Grown:
        """Apply rules within limits."""
        grown = grow(self.graph, rules, limits)
        self.known = find_known(self.graph, frozen=self._frozen)
        return grown

    def calls(self) -> list[Call]:
        """All calls that a choice may need."""
        found: dict[Call, None] = {}
        for cls in self._reachable():
            for node in self.graph.nodes(cls):
                if node.operator not in FREE:
                    found[call_of(self.graph, self.known, cls, node)] = None
        return list(found)

    def calls_of(self, found: Found) -> list[Call]:
        """The calls of a graph that was chosen, and of the one that it came from."""
        used: dict[Call, None] = {}
        for choice in (found.choice, self.first()):
            for cls, node in choice.items():
                if node.operator not in FREE and cls not in self.known.constant:
                    used[call_of(self.graph, self.known, cls, node)] = None
        return list(used)

    def _reachable(self) -> list[int]:
        graph, constant = self.graph, self.known.constant
        seen: dict[int, None] = {}
        todo = [graph.find(self._classes[root]) for root in self._roots]
        while todo:
            cls = todo.pop()
            if cls not in seen and cls not in constant:
                seen[cls] = None
                todo += [graph.find(operand) for node in graph.nodes(cls) for operand in node.operands]
        return list(seen)

    def first(self) -> dict[int, Node]:
        """The graph as it was, as a choice."""
        chosen: dict[int, Node] = {}
        for term, cls in self._classes.items():
            node = self._terms.nodes[term]
            operands = tuple(self.graph.find(self._classes[operand]) for operand in node.operands)
            chosen.setdefault(self.graph.find(cls), node._replace(operands=operands))
        return chosen

    def choose(self, prices: CallPrices, grown: Grown, *, limit_s: float = 4.0, without: str = "") -> Found:
        """The cheapest graph, or that which the nodes of all rules but one allow. All `calls` must have been priced."""
        graph, constant = self.graph, self.known.constant
        reasons = graph.reasons()
        kept = set(self.first().items())

        def seconds(cls: int, node: Node) -> float:
            if without and reasons.get((cls, node)) == without and (cls, node) not in kept:
                return math.inf
            return 0.0 if node.operator in FREE else prices.seconds(call_of(graph, self.known, cls, node))

        first = self.first()
        roots = [self._classes[root] for root in self._roots]
        choice = extract(graph, roots, seconds, start=first, leaves=constant, limit_s=limit_s)
        before = sum(
            seconds(cls, node) for cls, node in first.items() if cls not in constant and not is_token(graph, cls)
        )
        read = {graph.find(operand) for node in choice.nodes.values() for operand in node.operands}
        fixed = smallest(graph, [cls for cls in (*read, *map(graph.find, roots)) if cls in constant])
        nodes = {**fixed, **choice.nodes}
        terms, place = build_terms(graph, nodes, [graph.find(root) for root in roots])
        terms.outputs = tuple(place[graph.find(self._classes[output])] for output in self._terms.outputs)
        used: dict[str, int] = {}
        for cls in place:
            reason = reasons.get((cls, nodes[cls]))
            if reason is not None and (cls, nodes[cls]) not in kept:
                used[reason] = used.get(reason, 0) + 1
        return Found(
            terms=terms,
            effects=None if self._effects is None else place[graph.find(self._classes[self._effects])],
            before_s=before,
            after_s=choice.seconds,
            proved=choice.proved,
            grown=grown,
            rules=used,
            choice=choice.nodes,
        )


def grow(graph: EGraph, rules: Guided, limits: Limits) -> Grown:
    """Simplify until nothing is new, then explore one round and merge, and so on, within limits."""
    start = time.perf_counter()
    merging = Merging()
    cut: dict[str, None] = {}
    ended: Ended = "rounds"

    def left(rounds: int) -> Limits:
        spent = time.perf_counter() - start
        return Limits(rounds=rounds, nodes=limits.nodes, seconds=limits.seconds - spent, matches=limits.matches)

    number = 0
    for number in range(1, limits.rounds + 1):
        before = len(graph), graph.num_unions
        for phase, rounds in ((rules.simplify, 8), (rules.explore, 1), (rules.fold, 2)):
            done = saturate(graph, phase, left(rounds))
            cut.update(dict.fromkeys(done.cut))
            if done.ended in ("nodes", "seconds"):
                return _grown(graph, number, done.ended, cut, start)
        for rule in rules.merge:
            merging.run(graph, rule, _MOST_MEMBERS)
        graph.rebuild()
        if (len(graph), graph.num_unions) == before:
            ended = "saturated"
            break
    saturate(graph, rules.simplify, left(8))
    return _grown(graph, number, ended, cut, start)


def _grown(graph: EGraph, rounds: int, ended: Ended, cut: Mapping[str, None], start: float) -> Grown:
    seconds = time.perf_counter() - start
    return Grown(rounds=rounds, ended=ended, num_nodes=len(graph), cut=tuple(cut), seconds=seconds)


def build_terms(graph: EGraph, nodes: Mapping[int, Node], roots: Iterable[int]) -> tuple[Terms, dict[int, int]]:
    """Terms of a choice, and the term of each class that the roots need. Raises CircularError for one with a circle."""
    terms = Terms()
    place: dict[int, int] = {}
    open_: set[int] = set()
    todo = [(root, False) for root in roots]
    while todo:
        cls, ready = todo.pop()
        if cls in place:
            continue
        node = nodes[cls]
        operands = [graph.find(operand) for operand in node.operands]
        if ready:
            place[cls] = terms.add(
                node._replace(operands=tuple(place[operand] for operand in operands)), graph.types[cls]
            )
        else:
            if cls in open_:
                raise CircularError
            open_.add(cls)
            todo.append((cls, True))
            todo += [(operand, False) for operand in operands if operand not in place]
    return terms, place
