"""The cheapest graph of an e-graph: one node of each class that is needed, shared terms counted once.

An integer program for HiGHS: ``x`` says whether a node is chosen, ``y`` whether a class is needed.

    minimise   Σ seconds · x
    where      y(root) = 1,   Σ x(nodes of c) = y(c),   y(d) ≥ Σ x(nodes of c that read d)

A choice must not go round in circles. Circles of two classes are forbidden from the start; a longer one is when a
solution has it: at least one of its classes must not read the next, Σ x(nodes of c that read the next) ≤ length - 1,
and the program is solved again. Levels of classes, which forbid all circles at once, take HiGHS ten times as long.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from meshwright.solving import Rows, minimise, strong_components

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set

    from numpy.typing import NDArray

    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.terms import Node

_Option: TypeAlias = "tuple[float, Node, frozenset[int]]"

# Of two graphs of one price, that of fewer nodes.
_PER_NODE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A node for each class that is needed. ``seconds``: the sum of theirs; ``proved``: nothing is cheaper."""

    nodes: Mapping[int, Node]
    seconds: float
    proved: bool


def extract(
    graph: EGraph,
    roots: Iterable[int],
    seconds: Callable[[int, Node], float],
    *,
    start: Mapping[int, Node],
    leaves: Set[int] = frozenset(),
    limit_s: float = 10.0,
) -> Choice:
    """The cheapest choice for ``roots``. ``start`` is one that is known; the result is never dearer.

    ``seconds`` of a class and one of its nodes; infinity for a node that must not be chosen. ``leaves`` are classes
    that cost nothing, however they are made (what is computed once). Raises MeshwrightError where HiGHS is not
    installed.
    """
    wanted = list(dict.fromkeys(graph.find(root) for root in roots if graph.find(root) not in leaves))
    space = _Space(graph, wanted, seconds, leaves)
    first = space.follow(lambda cls: start[cls])
    known = sum(seconds(cls, node) for cls, node in first.items())
    solved = _solve(space, first, limit_s)
    if solved is not None:
        nodes, proved = solved
        found = sum(seconds(cls, node) for cls, node in nodes.items())
        if found <= known:
            return Choice(nodes=nodes, seconds=found, proved=proved)
    return Choice(nodes=first, seconds=known, proved=False)


class _Space:
    """Classes that the roots may need, with the nodes worth considering: (seconds, node, the classes it reads)."""

    def __init__(
        self, graph: EGraph, roots: Sequence[int], seconds: Callable[[int, Node], float], leaves: Set[int]
    ) -> None:
        self._graph, self._leaves, self.root_classes = graph, leaves, roots
        self.options: dict[int, list[_Option]] = {}
        todo = list(roots)
        while todo:
            cls = todo.pop()
            if cls in self.options:
                continue
            every = []
            for node in graph.nodes(cls):
                cost = seconds(cls, node)
                reads = self.reads(node)
                if cost < math.inf and cls not in reads:
                    every.append((cost + _PER_NODE, node, reads))
            self.options[cls] = _undominated(every)
            todo += [operand for _, _, reads in self.options[cls] for operand in reads]
        self._drop_impossible()

    def reads(self, node: Node) -> frozenset[int]:
        """Classes that a node reads, but for leaves."""
        return frozenset(map(self._graph.find, node.operands)) - self._leaves

    def follow(self, chosen: Callable[[int], Node]) -> dict[int, Node]:
        """The classes that the roots need under a choice, with their nodes."""
        nodes: dict[int, Node] = {}
        todo = list(self.root_classes)
        while todo:
            cls = todo.pop()
            if cls not in nodes:
                nodes[cls] = chosen(cls)
                todo += self.reads(nodes[cls])
        return nodes

    def _drop_impossible(self) -> None:
        """Leave out nodes from which no inputs can be reached (all ways lead round in circles)."""
        reached: set[int] = set()
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for cls, options in self.options.items():
            for _, _, reads in options:
                for operand in reads:
                    readers[operand].append(cls)
        todo = list(self.options)
        while todo:
            cls = todo.pop()
            if cls not in reached and any(reads <= reached for _, _, reads in self.options[cls]):
                reached.add(cls)
                todo += readers[cls]
        for cls in self.options:
            self.options[cls] = [option for option in self.options[cls] if option[2] <= reached]


def _undominated(options: list[_Option]) -> list[_Option]:
    kept: list[_Option] = []
    for option in sorted(options, key=lambda item: (item[0], len(item[2]))):
        if not any(other[2] <= option[2] for other in kept):
            kept.append(option)
    return kept


def _solve(space: _Space, start: Mapping[int, Node], limit_s: float) -> tuple[dict[int, Node], bool] | None:
    columns = _Columns(space)
    first = columns.values_of(start)
    deadline = time.perf_counter() + limit_s
    while True:
        found = minimise(
            columns.costs,
            np.ones(len(columns.costs)),
            columns.rows(),
            columns.whole,
            purpose="The cheapest graph is chosen",
            deadline_s=max(deadline - time.perf_counter(), 0.1),
            gap=1e-6,
            start=first,
        )
        if found.values is None:
            return None
        values = found.values

        def chosen(cls: int) -> Node:
            options, place = space.options[cls], columns.first[cls]
            return options[int(values[place : place + len(options)].argmax())][1]  # noqa: B023 - called at once

        nodes = space.follow(chosen)
        circles = _circles(space, nodes)
        if not circles:
            return nodes, found.optimal
        if time.perf_counter() > deadline:
            return None
        for circle in circles:
            columns.forbid(circle)


def _circles(space: _Space, nodes: Mapping[int, Node]) -> list[list[int]]:
    """Circles of a choice, one for each component of classes that need each other."""
    reads = {cls: set(space.reads(node)) for cls, node in nodes.items()}
    found = []
    for component in strong_components(list(nodes), reads):
        if len(component) < 2:
            continue
        inside = set(component)
        # The shortest way from a class back to itself.
        start = component[0]
        came: dict[int, int] = {}
        todo = [start]
        while start not in came:
            following = []
            for cls in todo:
                for other in reads[cls] & inside:
                    if other not in came:
                        came[other] = cls
                        following.append(other)
            todo = following
        circle = [start]
        while came[circle[-1]] != start:
            circle.append(came[circle[-1]])
        found.append(circle[::-1])
    return found


class _Columns:
    """The program's columns: a class is needed, a node is chosen, the level of a class that lies on a cycle."""

    def __init__(self, space: _Space) -> None:
        self._space = space
        self.needed = {cls: i for i, cls in enumerate(space.options)}
        count = len(self.needed)
        self.first: dict[int, int] = {}
        for cls, options in space.options.items():
            self.first[cls] = count
            count += len(options)
        self.costs = np.zeros(count)
        self.whole = np.zeros(count, np.bool_)
        for cls, options in space.options.items():
            place = slice(self.first[cls], self.first[cls] + len(options))
            self.costs[place] = [cost for cost, _, _ in options]
            self.whole[place] = len(options) > 1
        self._entries: list[tuple[float, float, dict[int, float]]] = []
        for root in space.root_classes:
            self._entries.append((1.0, 1.0, {self.needed[root]: 1.0}))
        for cls, options in space.options.items():
            self._tie(cls, options)
        for one, other in self._mutual():
            self.forbid([one, other])

    def rows(self) -> Rows:
        """What ties them together."""
        rows = Rows()
        rows.add(np.array([low for low, _, _ in self._entries]), np.array([high for _, high, _ in self._entries]))
        lengths = [len(entries) for _, _, entries in self._entries]
        places = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.array([column for _, _, entries in self._entries for column in entries])
        rows.fill(places, columns, np.array([value for _, _, entries in self._entries for value in entries.values()]))
        return rows

    def _tie(self, cls: int, options: list[_Option]) -> None:
        first = self.first[cls]
        chosen = {first + i: 1.0 for i in range(len(options))}
        self._entries.append((0.0, 0.0, {self.needed[cls]: -1.0, **chosen}))
        for operand, places in self._readers(cls).items():
            self._entries.append((0.0, math.inf, {self.needed[operand]: 1.0, **dict.fromkeys(places, -1.0)}))

    def _readers(self, cls: int) -> dict[int, list[int]]:
        """By class that nodes of a class read: the columns of those nodes."""
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for i, (_, _, reads) in enumerate(self._space.options[cls]):
            for operand in reads:
                readers[operand].append(self.first[cls] + i)
        return readers

    def _mutual(self) -> list[tuple[int, int]]:
        """Pairs of classes that read each other."""
        reads = {cls: set(self._readers(cls)) for cls in self._space.options}
        return [
            (cls, other) for cls, others in reads.items() for other in others if cls < other and cls in reads[other]
        ]

    def forbid(self, circle: Sequence[int]) -> None:
        """No choice in which each class of a circle reads the next."""
        entries: dict[int, float] = {}
        for cls, following in zip(circle, (*circle[1:], circle[0]), strict=True):
            entries |= dict.fromkeys(self._readers(cls)[following], 1.0)
        self._entries.append((0.0, len(circle) - 1.0, entries))

    def values_of(self, choice: Mapping[int, Node]) -> NDArray[np.float64] | None:
        """A known choice as values of columns; None where one of its nodes was left out."""
        values = np.zeros(len(self.costs))
        reads_of: dict[int, frozenset[int]] = {}
        todo = list(self._space.root_classes)
        while todo:
            cls = todo.pop()
            if cls in reads_of:
                continue
            options = self._space.options[cls]
            place = next((i for i, option in enumerate(options) if option[1] == choice.get(cls)), None)
            if place is None:
                return None
            values[[self.needed[cls], self.first[cls] + place]] = 1.0
            reads_of[cls] = options[place][2]
            todo += reads_of[cls]
        return values


def smallest(graph: EGraph, wanted: Iterable[int]) -> dict[int, Node]:
    """For classes and all that they need, the node whose tree has the fewest operators."""
    size: dict[int, float] = {}
    chosen: dict[int, Node] = {}
    needed = _below(graph, wanted)
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for cls in needed:
        for node in graph.nodes(cls):
            for operand in node.operands:
                readers[graph.find(operand)].add(cls)
    todo = dict.fromkeys(needed)
    while todo:
        cls = next(iter(todo))
        del todo[cls]
        for node in graph.nodes(cls):
            total = 1.0 + sum(size.get(graph.find(operand), math.inf) for operand in node.operands)
            if total < size.get(cls, math.inf):
                size[cls], chosen[cls] = total, node
                todo.update(dict.fromkeys(readers[cls]))
    return chosen


def _below(graph: EGraph, wanted: Iterable[int]) -> list[int]:
    seen: dict[int, None] = {}
    todo = [graph.find(cls) for cls in wanted]
    while todo:
        cls = todo.pop()
        if cls not in seen:
            seen[cls] = None
            todo += [graph.find(operand) for node in graph.nodes(cls) for operand in node.operands]
    return list(seen)
