"""TASO's search, as a reference: one rewrite after another, cheapest graph first, dearer ones up to ``alpha``.

After Jia et al., TASO (SOSP 2019), section 5.1 and the published code: a queue by cost; the cheapest graph is popped,
every rule is applied at every match, and each new graph that costs less than alpha · best is queued.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from meshwright.rewrite.expressions import Name
from meshwright.rewrite.matching import Directed, Match, apply, matches, node_of
from meshwright.rewrite.search.call_costs import FREE, CallCosts, call_of
from meshwright.rewrite.search.graph_search import CircularError, build_terms
from meshwright.rewrite.search.loading import find_known, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.rewrite.search.ruleset import Guided
    from meshwright.rewrite.terms import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Backtracked:
    """The cheapest graph that was met, with its predicted seconds, how many were popped, and how many were new."""

    terms: Terms
    seconds: float
    num_popped: int
    num_graphs: int


def backtrack(
    terms: Terms,
    rules: Guided,
    costs: CallCosts,
    *,
    frozen: bool,
    alpha: float = 1.05,
    most_popped: int = 1000,
    limit_s: float = 60.0,
) -> Backtracked:
    """Search as TASO does, for graphs without effects; new calls are estimated as they are met."""
    deadline = time.perf_counter() + limit_s
    ways = (*rules.simplify, *rules.explore, *rules.fold, *rules.merge)
    first = _cost(terms, costs, frozen)
    best, best_s = terms, first
    order = count()
    queue = [(first, next(order), terms)]
    known = {_label(terms)}
    popped = 0
    while queue and popped < most_popped and time.perf_counter() < deadline:
        seconds, _, current = heapq.heappop(queue)
        popped += 1
        if seconds > alpha * best_s:
            break
        for new in _neighbours(current, ways, frozen):
            label = _label(new)
            if label in known:
                continue
            known.add(label)
            cost = _cost(new, costs, frozen)
            if cost < best_s:
                best, best_s = new, cost
            if cost < alpha * best_s:
                heapq.heappush(queue, (cost, next(order), new))
            if time.perf_counter() > deadline:
                break
    return Backtracked(terms=best, seconds=best_s, num_popped=popped, num_graphs=len(known))


def _label(terms: Terms) -> tuple[object, ...]:
    return (tuple(terms.nodes), terms.outputs)


def _cost(terms: Terms, costs: CallCosts, frozen: bool) -> float:
    graph, _ = load(terms, terms.outputs)
    known = find_known(graph, frozen=frozen)
    calls = [
        call_of(graph, known, cls, node)
        for cls in graph.classes()
        if cls not in known.constant
        for node in graph.nodes(cls)
        if node.operator not in FREE
    ]
    costs.estimate(calls)
    return sum(map(costs.seconds, calls))


def _neighbours(terms: Terms, ways: tuple[Directed, ...], frozen: bool) -> Iterator[Terms]:
    graph, _ = load(terms, terms.outputs, frozen=frozen)
    for way in ways:
        for match in matches(graph, way):
            new = _replaced(terms, way, match, frozen)
            if new is not None:
                yield new


def _replaced(terms: Terms, way: Directed, match: Match, frozen: bool) -> Terms | None:
    """The graph with a rule applied at one place, on an e-graph that holds nothing else."""
    graph, classes = load(terms, terms.outputs, frozen=frozen)
    names = [graph.earliest(match.tensors[target.name]) if isinstance(target, Name) else None for target in way.targets]
    if not apply(graph, way, match):
        return None
    graph.rebuild()
    chosen = {cls: graph.earliest(cls) for cls in graph.classes()}
    for output, target, name in zip(match.outputs, way.targets, names, strict=True):
        chosen[graph.find(output)] = name or node_of(graph, target, match)
    roots = [graph.find(classes[output]) for output in terms.outputs]
    try:
        made, place = build_terms(graph, chosen, roots)
    except CircularError:
        return None
    made.outputs = tuple(place[root] for root in roots)
    return made
