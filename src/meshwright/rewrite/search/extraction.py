"""The cheapest graph of an e-graph: one node of each class that is needed, shared terms counted once.

An integer program for HiGHS: ``x`` says whether a node is chosen, ``y`` whether a class is needed.

    minimise   Σ seconds · x
    where      y(root) = 1,   Σ x(nodes of c) = y(c),   y(d) ≥ Σ x(nodes of c that read d)
               level(c) ≥ level(d) + 1 - size · (1 - x)      where c reads d and both lie on a cycle

Classes of one node that is needed anyway stay what they are and cost no variable.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
                reads = self._reads(node)
                if cost < math.inf and cls not in reads:
                    every.append((cost + _PER_NODE, node, reads))
            self.options[cls] = _undominated(every)
            todo += [operand for _, _, reads in self.options[cls] for operand in reads]
        self._drop_impossible()
        self.component = self._components()

    def _reads(self, node: Node) -> frozenset[int]:
        return frozenset(map(self._graph.find, node.operands)) - self._leaves

    def follow(self, chosen: Callable[[int], Node]) -> dict[int, Node]:
        """The classes that the roots need under a choice, with their nodes."""
        nodes: dict[int, Node] = {}
        todo = list(self.root_classes)
        while todo:
            cls = todo.pop()
            if cls not in nodes:
                nodes[cls] = chosen(cls)
                todo += self._reads(nodes[cls])
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

    def _components(self) -> dict[int, int]:
        """The strongly connected component of each class, for those of more than one class."""
        reads = {cls: {item for option in options for item in option[2]} for cls, options in self.options.items()}
        found = strong_components(list(self.options), reads)
        return {cls: number for number, classes in enumerate(found) if len(classes) > 1 for cls in classes}


def _undominated(options: list[_Option]) -> list[_Option]:
    kept: list[_Option] = []
    for option in sorted(options, key=lambda item: (item[0], len(item[2]))):
        if not any(other[2] <= option[2] for other in kept):
            kept.append(option)
    return kept


def _solve(space: _Space, start: Mapping[int, Node], limit_s: float) -> tuple[dict[int, Node], bool] | None:
    columns = _Columns(space)
    found = minimise(
        columns.costs,
        columns.upper,
        columns.rows(),
        columns.whole,
        purpose="The cheapest graph is chosen",
        deadline_s=limit_s,
        gap=1e-6,
        start=columns.values_of(start),
    )
    if found.values is None:
        return None
    values = found.values

    def chosen(cls: int) -> Node:
        options, first = space.options[cls], columns.first[cls]
        return options[int(values[first : first + len(options)].argmax())][1]

    return space.follow(chosen), found.optimal


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
        self.level = {cls: count + i for i, cls in enumerate(space.component)}
        self.sizes = Counter(space.component.values())
        count += len(self.level)
        self.costs, self.upper = np.zeros(count), np.ones(count)
        self.whole = np.zeros(count, np.bool_)
        for cls, options in space.options.items():
            place = slice(self.first[cls], self.first[cls] + len(options))
            self.costs[place] = [cost for cost, _, _ in options]
            self.whole[place] = len(options) > 1
        for cls, column in self.level.items():
            self.upper[column] = self.sizes[space.component[cls]]

    def rows(self) -> Rows:
        """What ties them together."""
        self._entries: list[tuple[float, float, dict[int, float]]] = []
        for root in self._space.root_classes:
            self._entries.append((1.0, 1.0, {self.needed[root]: 1.0}))
        for cls, options in self._space.options.items():
            self._tie(cls, options)
        rows = Rows()
        rows.add(np.array([low for low, _, _ in self._entries]), np.array([high for _, high, _ in self._entries]))
        lengths = [len(entries) for _, _, entries in self._entries]
        places = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.array([column for _, _, entries in self._entries for column in entries])
        rows.fill(places, columns, np.array([value for _, _, entries in self._entries for value in entries.values()]))
        return rows

    def _tie(self, cls: int, options: list[_Option]) -> None:
        first, component = self.first[cls], self._space.component.get(cls)
        chosen = {first + i: 1.0 for i in range(len(options))}
        self._entries.append((0.0, 0.0, {self.needed[cls]: -1.0, **chosen}))
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for i, (_, _, reads) in enumerate(options):
            for operand in reads:
                readers[operand].append(first + i)
        for operand, places in readers.items():
            self._entries.append((0.0, math.inf, {self.needed[operand]: 1.0, **dict.fromkeys(places, -1.0)}))
            if component is not None and self._space.component.get(operand) == component:
                size = float(self.sizes[component])
                entries = {self.level[cls]: 1.0, self.level[operand]: -1.0, **dict.fromkeys(places, -size)}
                self._entries.append((1.0 - size, math.inf, entries))

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
        depth: dict[int, int] = {}
        component = self._space.component
        for cls in _operands_first(reads_of):
            inner = [depth[operand] for operand in reads_of[cls] if component.get(operand) == component.get(cls)]
            depth[cls] = 1 + max(inner, default=-1)
            if cls in self.level:
                values[self.level[cls]] = depth[cls]
        return values


def _operands_first(reads_of: Mapping[int, Iterable[int]]) -> list[int]:
    """Classes of a choice, operands before what reads them."""
    order: list[int] = []
    state: dict[int, bool] = {}
    for root in reads_of:
        todo = [(root, False)]
        while todo:
            cls, done = todo.pop()
            if done:
                state[cls] = True
                order.append(cls)
            elif cls not in state:
                state[cls] = False
                todo.append((cls, True))
                todo += [(operand, False) for operand in reads_of[cls] if operand not in state]
    return order


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
