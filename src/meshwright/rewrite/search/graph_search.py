"""`graph_search`: a cheaper graph of the same outputs, among all that rules lead to.

Rules fill an e-graph (`grow`), the cost model estimates its nodes, and HiGHS chooses (`extraction`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from meshwright.rewrite.matching import SaturationLimits, saturate
from meshwright.rewrite.search.call_costs import FREE, CallCosts, TorchCall, call_of
from meshwright.rewrite.search.extraction import extract, smallest
from meshwright.rewrite.search.loading import ClassFacts, find_known, is_token, load
from meshwright.rewrite.search.merging import Merging
from meshwright.rewrite.terms import TermNode, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.search.ruleset import Guided


Ended = Literal["saturated", "rounds", "nodes", "seconds"]

# Operators that one chain of merges may join.
_MOST_MEMBERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """How an e-graph grew: ``ended`` is why it stopped, ``cut`` the rules with too many matches."""

    rounds: int
    ended: Ended
    num_nodes: int
    cut: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGraph:
    """A graph of the same outputs. ``before_s`` and ``after_s`` are predicted; ``proved``: no graph is cheaper.

    ``rules``: the rules that added chosen nodes, with the number of nodes. ``united``: the rules that showed two of
    the original graph's terms to be equal, so that one remains, with their number. ``choice``: its nodes by class of
    the e-graph.
    """

    terms: Terms
    effects: int | None
    before_s: float
    after_s: float
    proved: bool
    grown: Grown
    rules: Mapping[str, int]
    united: Mapping[str, int]
    choice: Mapping[int, TermNode]


class CircularError(Exception):
    """A choice in which a node needs its own result."""


class GraphSpace:
    """All graphs that rules lead to from one graph; estimated, ready for a choice."""

    def __init__(self, terms: Terms, effects: int | None, *, frozen: bool, finite: Set[str] = frozenset()) -> None:
        self._terms, self._effects, self._frozen = terms, effects, frozen
        self._roots = (*terms.outputs, *(() if effects is None else (effects,)))
        self.graph, self._classes = load(terms, self._roots, finite, frozen=frozen)
        self._look()

    def grow(self, rules: Guided, limits: SaturationLimits) -> Grown:
        """Apply rules within limits; the limit of nodes counts new ones."""
        limits = replace(limits, nodes=limits.nodes + len(self.graph))
        grown = grow(self.graph, rules, limits)
        self._look()
        return grown

    def _look(self) -> None:
        """Update the facts about the e-graph."""
        self.known: ClassFacts = find_known(self.graph, frozen=self._frozen)
        self._calls: dict[tuple[int, TermNode], TorchCall] = {}
        self._reasons = self.graph.reasons()
        self._first = self._as_it_was()
        # The number of originally different terms that each class now contains.
        self._origins = Counter(map(self.graph.find, set(self._classes.values())))

    def call(self, cls: int, node: TermNode) -> TorchCall | None:
        """Return the call that a node of a class becomes; None for one that costs nothing."""
        if node.operator in FREE:
            return None
        found = self._calls.get((cls, node))
        if found is None:
            found = self._calls[cls, node] = call_of(self.graph, self.known, cls, node)
        return found

    def calls(self) -> list[TorchCall]:
        """All calls that a choice may need."""
        pairs = ((cls, node) for cls in self._reachable() for node in self.graph.nodes(cls))
        return list(dict.fromkeys(call for cls, node in pairs if (call := self.call(cls, node)) is not None))

    def calls_of(self, found: FoundGraph) -> list[TorchCall]:
        """Return the calls of a chosen graph, and of the original one."""
        pairs = ((cls, node) for choice in (found.choice, self._first) for cls, node in choice.items())
        used = (self.call(cls, node) for cls, node in pairs if cls not in self.known.constant)
        return list(dict.fromkeys(call for call in used if call is not None))

    def seconds(self, choice: Mapping[int, TermNode], costs: CallCosts) -> float:
        """Return the seconds of a choice at these costs."""
        graph, constant = self.graph, self.known.constant
        pairs = ((cls, node) for cls, node in choice.items() if cls not in constant and not is_token(graph, cls))
        return sum(costs.seconds(call) for cls, node in pairs if (call := self.call(cls, node)) is not None)

    def with_costs(self, found: FoundGraph, costs: CallCosts) -> FoundGraph:
        """Return the same graph at other costs, at which it may not be the cheapest."""
        before_s, after_s = self.seconds(self._first, costs), self.seconds(found.choice, costs)
        return replace(found, before_s=before_s, after_s=after_s, proved=False)

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

    def _as_it_was(self) -> dict[int, TermNode]:
        """The original graph, as a choice."""
        chosen: dict[int, TermNode] = {}
        for term, cls in self._classes.items():
            node = self._terms.nodes[term]
            operands = tuple(self.graph.find(self._classes[operand]) for operand in node.operands)
            chosen.setdefault(self.graph.find(cls), node._replace(operands=operands))
        return chosen

    def choose(self, costs: CallCosts, grown: Grown, *, limit_s: float = 4.0, without: str = "") -> FoundGraph:
        """Return the cheapest graph; ``without``: without the nodes of that rule. All `calls` must have costs."""
        graph, constant, first, reasons = self.graph, self.known.constant, self._first, self._reasons
        kept = set(first.items())

        def seconds(cls: int, node: TermNode) -> float:
            if without and reasons.get((cls, node)) == without and (cls, node) not in kept:
                return math.inf
            call = self.call(cls, node)
            return 0.0 if call is None else costs.seconds(call)

        roots = [self._classes[root] for root in self._roots]
        choice = extract(graph, roots, seconds, start=first, leaves=constant, limit_s=limit_s)
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
        return FoundGraph(
            terms=terms,
            effects=None if self._effects is None else place[graph.find(self._classes[self._effects])],
            before_s=self.seconds(first, costs),
            after_s=choice.seconds,
            proved=choice.proved,
            grown=grown,
            rules=used,
            united=Counter(rule for cls, rule in graph.united() if cls in place and self._origins[cls] > 1),
            choice=choice.nodes,
        )


def grow(graph: EGraph, rules: Guided, limits: SaturationLimits) -> Grown:
    """Simplify until nothing is new, then explore one round and merge, and so on, within limits."""
    start = time.perf_counter()
    merging = Merging()
    seen = [0, 0, 0]
    cut: dict[str, None] = {}
    ended: Ended = "rounds"

    def left(rounds: int) -> SaturationLimits:
        spent = time.perf_counter() - start
        return SaturationLimits(
            rounds=rounds, nodes=limits.nodes, seconds=limits.seconds - spent, matches=limits.matches
        )

    number = 0
    for number in range(1, limits.rounds + 1):
        before = len(graph), graph.num_unions
        for i, (phase, rounds) in enumerate(((rules.simplify, 8), (rules.explore, 1), (rules.fold, 2))):
            done = saturate(graph, phase, left(rounds), seen[i])
            seen[i] = done.until
            cut.update(dict.fromkeys(done.cut))
            if done.ended in ("nodes", "seconds"):
                return _grown(graph, number, done.ended, cut, start)
        for rule in rules.merge:
            merging.run(graph, rule, _MOST_MEMBERS)
        graph.rebuild()
        if (len(graph), graph.num_unions) == before:
            ended = "saturated"
            break
    saturate(graph, rules.simplify, left(8), seen[0])
    return _grown(graph, number, ended, cut, start)


def _grown(graph: EGraph, rounds: int, ended: Ended, cut: Mapping[str, None], start: float) -> Grown:
    seconds = time.perf_counter() - start
    return Grown(rounds=rounds, ended=ended, num_nodes=len(graph), cut=tuple(cut), seconds=seconds)


def build_terms(graph: EGraph, nodes: Mapping[int, TermNode], roots: Iterable[int]) -> tuple[Terms, dict[int, int]]:
    """Return terms of a choice, and the term of each class that the roots need.

    Raises CircularError for one with a circle.
    """
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
