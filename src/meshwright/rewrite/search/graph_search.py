"""Search the cheapest graph that is equivalent to a given one under a set of rules (`GraphSpace`).

Rules add equivalent nodes to an e-graph (`grow`), the cost model gives each node a cost in seconds, and an integer
program, solved by HiGHS, chooses the cheapest graph (`extraction`).
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
    """The result of `grow`: size of the e-graph, rounds and seconds.

    ``ended``: "saturated" if nothing new appeared, else the limit that was reached. ``cut``: the rules whose matches
    exceeded their limit, so that some were not applied.
    """

    rounds: int
    ended: Ended
    num_nodes: int
    cut: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGraph:
    """An equivalent graph that the search chose.

    ``terms``: the graph. ``effects``: the term whose token orders its writes and random draws, or None. ``before_s``
    and ``after_s``: predicted seconds of the original and of this graph. ``proved``: True if no graph of the e-graph is
    cheaper. ``rules``: by rule, the number of this graph's nodes that it added. ``united``: by rule, the number of
    times that it showed two terms of the original graph to be equal. ``choice``: the node of each class.
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
    """A choice of nodes contains a cycle: a node needs its own result."""


class GraphSpace:
    """All graphs that rules derive from one graph, as an e-graph, from which the cheapest can be chosen.

    ``effects``: the term whose token orders writes and random draws, or None. ``frozen``: weights never change
    (inference). ``finite``: names of stored tensors that contain only finite numbers, now and later.
    """

    def __init__(self, terms: Terms, effects: int | None, *, frozen: bool, finite: Set[str] = frozenset()) -> None:
        self._terms, self._effects, self._frozen = terms, effects, frozen
        self._roots = (*terms.outputs, *(() if effects is None else (effects,)))
        self.graph, self._classes = load(terms, self._roots, finite, frozen=frozen)
        self._look()

    def grow(self, rules: Guided, limits: SaturationLimits) -> Grown:
        """Apply rules within limits; ``limits.nodes`` counts only the nodes that are added."""
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
        """Return the torch call that a node of class ``cls`` becomes; None for a node that costs nothing."""
        if node.operator in FREE:
            return None
        found = self._calls.get((cls, node))
        if found is None:
            found = self._calls[cls, node] = call_of(self.graph, self.known, cls, node)
        return found

    def calls(self) -> list[TorchCall]:
        """Return the torch calls of all nodes that a choice may contain, each once."""
        pairs = ((cls, node) for cls in self._reachable() for node in self.graph.nodes(cls))
        return list(dict.fromkeys(call for cls, node in pairs if (call := self.call(cls, node)) is not None))

    def calls_of(self, found: FoundGraph) -> list[TorchCall]:
        """Return the torch calls of a chosen graph and of the original graph, each once; without those of constants."""
        pairs = ((cls, node) for choice in (found.choice, self._first) for cls, node in choice.items())
        used = (self.call(cls, node) for cls, node in pairs if cls not in self.known.constant)
        return list(dict.fromkeys(call for call in used if call is not None))

    def seconds(self, choice: Mapping[int, TermNode], costs: CallCosts) -> float:
        """Return the predicted seconds of a choice; constants cost nothing."""
        graph, constant = self.graph, self.known.constant
        pairs = ((cls, node) for cls, node in choice.items() if cls not in constant and not is_token(graph, cls))
        return sum(costs.seconds(call) for cls, node in pairs if (call := self.call(cls, node)) is not None)

    def with_costs(self, found: FoundGraph, costs: CallCosts) -> FoundGraph:
        """Return the same graph with seconds by other costs; its ``proved`` is False."""
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
        """Return the cheapest graph; all `calls` must have costs.

        ``limit_s``: seconds for the integer programs. ``without``: a rule whose nodes must not be chosen.
        """
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
    """Apply rules to an e-graph in rounds until nothing new appears or a limit is reached.

    In each round, simplifying rules are applied until nothing new appears (at most 8 times), then exploring rules once,
    folding rules twice, and merges.
    """
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
    """Return the graph of a choice (a node by class), and the term of each class that the roots need.

    Raises CircularError if the choice contains a cycle.
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
