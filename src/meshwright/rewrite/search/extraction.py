"""Find the cheapest graph of an e-graph (`extract`): one node of each needed class; shared nodes are counted once.

The problem separates into independent groups of classes (`ClassOptions.parts`). Each group is an integer program for
HiGHS: ``x`` is 1 if a node is chosen, ``y`` is 1 if a class is needed.

    minimise   Σ seconds · x
    where      y(certain) = 1,   Σ x(nodes of c) = y(c),   y(d) ≥ Σ x(nodes of c that read d)

A choice must not contain a cycle. Cycles of two classes are forbidden from the start; a longer one is forbidden once a
solution contains it: at least one of its classes must not read the next, Σ x(nodes of c that read the next) ≤ length -
1, and the parts of the cycle are solved again, as one. Levels of classes, which forbid all cycles at once, take HiGHS
ten times as long.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.solving import SparseRows, minimise, strong_components

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set

    from numpy.typing import NDArray

    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.terms import TermNode


# Between graphs of equal cost, prefer fewer nodes, then fewer operands.
_PER_NODE, _PER_OPERAND = 1e-9, 1e-11

# Seconds of a tree that is never worth computing.
_ENDLESS = 1e100


def complexity(nodes: Iterable[TermNode]) -> float:
    """Return a tiny number of seconds, by numbers of nodes and operands, that breaks ties between equal costs."""
    return sum(_PER_NODE + _PER_OPERAND * len(node.operands) for node in nodes)


class Waiting:
    """A first-in, first-out queue of classes without duplicates."""

    def __init__(self, classes: Iterable[int]) -> None:
        self._queue = deque(classes)
        self._inside = set(self._queue)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, classes: Iterable[int]) -> None:
        """Append the classes that are not in the queue."""
        new = [cls for cls in dict.fromkeys(classes) if cls not in self._inside]
        self._queue.extend(new)
        self._inside.update(new)

    def pop(self) -> int:
        """Remove and return the first class."""
        cls = self._queue.popleft()
        self._inside.discard(cls)
        return cls


class Option(NamedTuple):
    """A node that may be chosen for its class: its cost in seconds, and the classes of its operands except leaves."""

    seconds: float
    node: TermNode
    reads: frozenset[int]


# Most nodes of an e-graph are in no cheapest graph, which can be shown before the search:
#
# - A class is *certain* if every graph of the roots contains it (dominators of an AND-OR graph: a node needs what all
#   graphs of each of its operands need; a class needs what all of its nodes need in common).
# - The *tree cost* of a class is an upper bound of its cost: the sum over the nodes of its tree, shared or not. Certain
#   classes are computed anyway, and cost nothing more. A certain class that might itself need the class (in one strong
#   component) is counted, because it may not be computed before.
# - A node is a *detour* if all readers of its class can read the node's own operands instead, at no higher cost: a
#   slice of a slice.
# - A node is *dominated* if another node of its class, with the trees of all classes that only that one reads, costs
#   less than the node alone: in any graph, that node could take its place without a cycle.
class ClassOptions:
    """The options (nodes) of each class that may be in a cheapest graph; ``of`` maps a class to them.

    ``roots``: the classes to compute. ``seconds(class, node)``: a node's cost in seconds; infinity if the node must not
    be chosen. ``leaves``: classes that cost nothing.
    """

    def __init__(
        self,
        graph: EGraph,
        roots: Sequence[int],
        seconds: Callable[[int, TermNode], float],
        leaves: Set[int],
    ) -> None:
        self._graph, self._leaves, self.roots = graph, leaves, roots
        self.of: dict[int, list[Option]] = {}
        todo = list(roots)
        while todo:
            cls = todo.pop()
            if cls in self.of:
                continue
            every = []
            for node in graph.nodes(cls):
                cost = seconds(cls, node)
                reads = self.reads(node)
                if cost < math.inf and cls not in reads:
                    every.append(Option(cost + complexity([node]), node, reads))
            self.of[cls] = _cheapest_of_equals(every)
            todo += [operand for option in self.of[cls] for operand in option.reads]
        self._drop_impossible()
        self.certain = self._prune()
        # By class, the classes that may read it.
        self.readers: Mapping[int, list[int]] = self._find_readers()

    def reads(self, node: TermNode) -> frozenset[int]:
        """Return the classes of a node's operands, except leaves."""
        return frozenset(map(self._graph.find, node.operands)) - self._leaves

    def follow(self, chosen: Mapping[int, TermNode]) -> dict[int, TermNode]:
        """Return the part of a choice (a node by class) from which the roots are computed."""
        nodes: dict[int, TermNode] = {}
        todo = list(self.roots)
        while todo:
            cls = todo.pop()
            if cls not in nodes:
                nodes[cls] = chosen[cls]
                todo += self.reads(nodes[cls])
        return nodes

    def parts(self) -> list[list[int]]:
        """Return the classes in groups whose nodes can be chosen independently, apart from cycles across groups.

        A certain class is part of every graph, so only uncertain classes connect groups.
        """
        group = {cls: cls for cls in self.of}

        def find(cls: int) -> int:
            while group[cls] != cls:
                group[cls] = group[group[cls]]
                cls = group[cls]
            return cls

        for cls, options in self.of.items():
            for option in options:
                for operand in option.reads - self.certain:
                    group[find(operand)] = find(cls)
        found: defaultdict[int, list[int]] = defaultdict(list)
        for cls in self.of:
            found[find(cls)].append(cls)
        return list(found.values())

    def by_trees(self) -> dict[int, TermNode]:
        """Return for each class the root node of its cheapest tree: an acyclic choice, not always the cheapest."""
        _, best = self._trees({}, {})
        return {cls: self.of[cls][place].node for cls, place in best.items()}

    def _drop_impossible(self) -> None:
        """Remove nodes that cannot be computed from inputs (all their ways are cyclic)."""
        reached: set[int] = set()
        readers = self._find_readers()
        todo = list(self.of)
        while todo:
            cls = todo.pop()
            if cls not in reached and any(option.reads <= reached for option in self.of[cls]):
                reached.add(cls)
                todo += readers[cls]
        self.of = {
            cls: [option for option in options if option.reads <= reached]
            for cls, options in self.of.items()
            if cls in reached
        }

    def _find_readers(self) -> defaultdict[int, list[int]]:
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for cls, options in self.of.items():
            for operand in dict.fromkeys(operand for option in options for operand in option.reads):
                readers[operand].append(cls)
        return readers

    def _prune(self) -> frozenset[int]:
        """Remove dominated options, and what only they need; return the classes that are then certain."""
        while True:
            order, component = self._components()
            bit = {cls: 1 << i for i, cls in enumerate(order)}
            needs = self._needs(order, bit)
            certain = 0
            for root in self.roots:
                certain |= needs[root]
            inside: defaultdict[int, int] = defaultdict(int)
            for cls in order:
                inside[component[cls]] |= bit[cls]
            given = {cls: certain & ~inside[component[cls]] for cls in order}
            trees, best = self._trees(given, bit)
            dominated = 0
            for cls, options in self.of.items():
                kept = []
                for place, option in enumerate(options):
                    there = given[cls]
                    for operand in option.reads:
                        there |= needs[operand]
                    if place == best[cls] or not any(
                        other.seconds + sum(trees[operand] for operand in other.reads if not bit[operand] & there)
                        < option.seconds
                        for other in options
                        if other is not option
                    ):
                        kept.append(option)
                dominated += len(options) - len(kept)
                self.of[cls] = kept
            self._drop_unneeded()
            dominated += self._drop_detours()
            if not dominated:
                return frozenset(cls for cls in self.of if bit[cls] & certain)

    def served(self, cls: int, option: Option, readers: Iterable[int]) -> list[tuple[int, int]]:
        """Return (class, position) of the options of ``readers`` that read ``cls`` and for which this one is needed."""
        found = []
        for reader in readers:
            for place, through in enumerate(self.of[reader]):
                if cls not in through.reads:
                    continue
                reached = (option.reads | through.reads) - {cls}
                if not any(each.reads <= reached and each.seconds <= through.seconds for each in self.of[reader]):
                    found.append((reader, place))
        return found

    def _drop_detours(self) -> int:
        """Remove options that are detours for all readers; return their number.

        Classes without options have no readers then.
        """
        readers = self._find_readers()
        roots = set(self.roots)
        count = 0
        for cls in [cls for cls in self.of if cls not in roots]:
            kept = [option for option in self.of[cls] if self.served(cls, option, readers[cls])]
            count += len(self.of[cls]) - len(kept)
            self.of[cls] = kept
        if count:
            self._drop_impossible()
            self._drop_unneeded()
        return count

    def _drop_unneeded(self) -> None:
        seen: dict[int, None] = {}
        todo = list(self.roots)
        while todo:
            cls = todo.pop()
            if cls not in seen:
                seen[cls] = None
                todo += [operand for option in self.of[cls] for operand in option.reads]
        self.of = {cls: self.of[cls] for cls in seen}

    def _components(self) -> tuple[list[int], dict[int, int]]:
        """Classes in order of reading as far as possible (read before reader), and the strong component of each."""
        reads = {cls: {operand for option in options for operand in option.reads} for cls, options in self.of.items()}
        components = strong_components(list(self.of), reads)[::-1]
        return [cls for found in components for cls in found], {
            cls: i for i, found in enumerate(components) for cls in found
        }

    def _needs(self, order: Sequence[int], bit: Mapping[int, int]) -> dict[int, int]:
        """By class, the classes that each of its graphs contains, itself included, as bits.

        This is the greatest fixed point, computed from above.
        """
        every = (1 << len(order)) - 1
        needs = dict.fromkeys(order, every)
        readers = self._find_readers()
        todo = Waiting(order)
        while todo:
            cls = todo.pop()
            common = every
            for option in self.of[cls]:
                below = 0
                for operand in option.reads:
                    below |= needs[operand]
                common &= below
            common |= bit[cls]
            if common != needs[cls]:
                needs[cls] = common
                todo.add(readers[cls])
        return needs

    def _trees(self, given: Mapping[int, int], bit: Mapping[int, int]) -> tuple[dict[int, float], dict[int, int]]:
        """By class its tree cost, and the index of the option that attains it.

        ``given``: bits of classes that are free.
        """
        trees = dict.fromkeys(self.of, math.inf)
        best: dict[int, int] = {}
        readers = self._find_readers()
        todo = Waiting(self.of)
        while todo:
            cls = todo.pop()
            for place, option in enumerate(self.of[cls]):
                free = given.get(cls, 0)
                total = option.seconds + sum(
                    trees[operand] for operand in option.reads if not free & bit.get(operand, 0)
                )
                # Tree costs of deep graphs with much sharing overflow.
                total = min(total, _ENDLESS)
                if total < trees[cls]:
                    trees[cls], best[cls] = total, place
                    todo.add(readers[cls])
        return trees, best


def _cheapest_of_equals(options: list[Option]) -> list[Option]:
    """Without options that read everything that a cheaper one reads, and more."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda item: (item.seconds, len(item.reads))):
        if not any(other.reads <= option.reads for other in kept):
            kept.append(option)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen node of each needed class; ``seconds``: the sum of their costs; ``proved``: no choice is cheaper."""

    nodes: Mapping[int, TermNode]
    seconds: float
    proved: bool


def extract(
    graph: EGraph,
    roots: Iterable[int],
    seconds: Callable[[int, TermNode], float],
    *,
    start: Mapping[int, TermNode],
    leaves: Set[int] = frozenset(),
    limit_s: float = 10.0,
) -> Choice:
    """Return the cheapest choice from which ``roots`` can be computed; it never costs more than ``start``, a known one.

    ``seconds(class, node)``: a node's cost; infinity for a node that must not be chosen. ``leaves``: classes that cost
    nothing (constants, computed once). ``limit_s``: seconds for the integer programs. Raises MeshwrightError if HiGHS
    is not installed.
    """
    wanted = list(dict.fromkeys(graph.find(root) for root in roots if graph.find(root) not in leaves))
    options = ClassOptions(graph, wanted, seconds, leaves)

    def total(nodes: Mapping[int, TermNode]) -> float:
        return sum(seconds(cls, node) for cls, node in nodes.items())

    trees = options.by_trees()
    known = min((options.follow(way) for way in (start, trees)), key=total)
    nodes, proved = _solve(options, known, limit_s)
    best = min(known, nodes, key=lambda choice: (total(choice), complexity(choice.values())))
    return Choice(nodes=best, seconds=total(best), proved=proved)


def _solve(options: ClassOptions, known: Mapping[int, TermNode], limit_s: float) -> tuple[dict[int, TermNode], bool]:
    """Solve part after part, and joined parts again after a cycle; known choices stay when the time is over."""
    deadline = time.perf_counter() + limit_s
    parts = {i: _Part(options, classes) for i, classes in enumerate(options.parts())}
    part_of = {cls: i for i, part in parts.items() for cls in part.classes}
    trees = options.by_trees()
    chosen = {**trees, **known}
    proved = True
    if not parts:
        # All wanted classes are constants.
        return {}, True
    todo = list(parts)
    while todo:
        for number in todo:
            found = parts[number].solve(chosen, deadline)
            if found is None:
                return dict(known), False
            nodes, optimal = found
            chosen.update(nodes)
            proved &= optimal
        result = options.follow(chosen)
        circles = _circles(options, result)
        if circles and time.perf_counter() > deadline:
            return dict(known), False
        todo = []
        for circle in circles:
            joined = sorted({part_of[cls] for cls in circle})
            whole = _Part.joined([parts.pop(number) for number in joined])
            whole.forbid(circle)
            parts[joined[0]] = whole
            part_of |= dict.fromkeys(whole.classes, joined[0])
            todo = [number for number in dict.fromkeys((*todo, joined[0])) if number in parts]
    return result, proved


def _circles(options: ClassOptions, nodes: Mapping[int, TermNode]) -> list[list[int]]:
    """Cycles of a choice, one for each component of classes that need each other."""
    reads = {cls: set(options.reads(node)) for cls, node in nodes.items()}
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


class _Part:
    """The integer program of some classes. Its columns: a class is needed, a node is chosen."""

    def __init__(self, options: ClassOptions, classes: Sequence[int], circles: Sequence[Sequence[int]] = ()) -> None:
        self.classes = classes
        self._options = options
        self._circles = list(circles)

    @classmethod
    def joined(cls, parts: Sequence[_Part]) -> _Part:
        """Several parts as one."""
        classes = [each for part in parts for each in part.classes]
        return cls(parts[0]._options, classes, [circle for part in parts for circle in part._circles])

    def forbid(self, circle: Sequence[int]) -> None:
        """No choice in which each class of a circle reads the next."""
        self._circles.append(circle)

    def solve(self, known: Mapping[int, TermNode], deadline: float) -> tuple[dict[int, TermNode], bool] | None:
        """The cheapest nodes, and whether they are proved cheapest; None if the time is over before any are found."""
        of = self._options.of
        if all(len(of[cls]) == 1 for cls in self.classes):
            return {cls: of[cls][0].node for cls in self.classes}, True
        columns = _Columns(self._options, self.classes)
        for circle in self._circles:
            columns.forbid(circle)
        found = minimise(
            columns.costs,
            np.ones(len(columns.costs)),
            columns.rows(),
            columns.whole,
            purpose="The cheapest graph is chosen",
            deadline_s=max(deadline - time.perf_counter(), 0.1),
            gap=1e-6,
            start=columns.values_of(known),
        )
        if found.values is None:
            return None
        nodes = {}
        for cls in self.classes:
            place = columns.first[cls]
            values = found.values[place : place + len(of[cls])]
            if values.max() > 0.5:
                nodes[cls] = of[cls][int(values.argmax())].node
        return nodes, found.optimal


class _Columns:
    def __init__(self, options: ClassOptions, classes: Sequence[int]) -> None:
        self._options = options
        self.needed = {cls: i for i, cls in enumerate(classes)}
        count = len(self.needed)
        self.first: dict[int, int] = {}
        for cls in classes:
            self.first[cls] = count
            count += len(options.of[cls])
        self.costs = np.zeros(count)
        self.whole = np.zeros(count, np.bool_)
        self._entries: list[tuple[float, float, dict[int, float]]] = []
        for cls in classes:
            place = slice(self.first[cls], self.first[cls] + len(options.of[cls]))
            self.costs[place] = [option.seconds for option in options.of[cls]]
            self.whole[place] = len(options.of[cls]) > 1
            if cls in options.certain:
                self._entries.append((1.0, 1.0, {self.needed[cls]: 1.0}))
        for cls in classes:
            self._tie(cls)
        for one, other in self._mutual():
            self.forbid([one, other])
        for cls in classes:
            if cls not in options.certain and len(options.of[cls]) > 1:
                self._tie_detours(cls, options.readers[cls])

    def rows(self) -> SparseRows:
        """The constraints between columns."""
        rows = SparseRows()
        rows.add(np.array([low for low, _, _ in self._entries]), np.array([high for _, high, _ in self._entries]))
        lengths = [len(entries) for _, _, entries in self._entries]
        places = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.array([column for _, _, entries in self._entries for column in entries])
        rows.fill(places, columns, np.array([value for _, _, entries in self._entries for value in entries.values()]))
        return rows

    def _tie(self, cls: int) -> None:
        first = self.first[cls]
        chosen = {first + i: 1.0 for i in range(len(self._options.of[cls]))}
        self._entries.append((0.0, 0.0, {self.needed[cls]: -1.0, **chosen}))
        for operand, places in self._readers(cls).items():
            if operand not in self._options.certain:
                self._entries.append((0.0, math.inf, {self.needed[operand]: 1.0, **dict.fromkeys(places, -1.0)}))

    def _tie_detours(self, cls: int, readers: Sequence[int]) -> None:
        """An option that is a detour for some of a class's readers is chosen only with one of the others."""
        for place, option in enumerate(self._options.of[cls]):
            served = self._options.served(cls, option, readers)
            if len(served) < sum(cls in each.reads for reader in readers for each in self._options.of[reader]):
                others = {self.first[reader] + i: 1.0 for reader, i in served}
                self._entries.append((0.0, math.inf, {**others, self.first[cls] + place: -1.0}))

    def _readers(self, cls: int) -> dict[int, list[int]]:
        """By class that nodes of a class read: the columns of those nodes."""
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for i, option in enumerate(self._options.of[cls]):
            for operand in option.reads:
                readers[operand].append(self.first[cls] + i)
        return readers

    def _mutual(self) -> list[tuple[int, int]]:
        """Pairs of classes that read each other."""
        reads = {cls: set(self._readers(cls)) for cls in self.needed}
        return [
            (cls, other)
            for cls, others in reads.items()
            for other in others & self.needed.keys()
            if cls < other and cls in reads[other]
        ]

    def forbid(self, circle: Sequence[int]) -> None:
        """No choice in which each class of a circle reads the next."""
        entries: dict[int, float] = {}
        for cls, following in zip(circle, (*circle[1:], circle[0]), strict=True):
            entries |= dict.fromkeys(self._readers(cls)[following], 1.0)
        self._entries.append((0.0, len(circle) - 1.0, entries))

    def values_of(self, known: Mapping[int, TermNode]) -> NDArray[np.float64] | None:
        """A known choice as values of columns; None if one of its nodes was left out."""
        values = np.zeros(len(self.costs))
        seen: set[int] = set()
        todo = [cls for cls in self.needed if cls in self._options.certain]
        while todo:
            cls = todo.pop()
            if cls in seen:
                continue
            seen.add(cls)
            options = self._options.of[cls]
            place = next((i for i, option in enumerate(options) if option.node == known.get(cls)), None)
            if place is None:
                return None
            values[[self.needed[cls], self.first[cls] + place]] = 1.0
            todo += options[place].reads & self.needed.keys() - self._options.certain
        return values


def smallest(graph: EGraph, wanted: Iterable[int]) -> dict[int, TermNode]:
    """Return, for each wanted class and each class below it, the node whose tree has the fewest operators."""
    size: dict[int, float] = {}
    chosen: dict[int, TermNode] = {}
    needed = _below(graph, wanted)
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for cls in needed:
        for node in graph.nodes(cls):
            for operand in node.operands:
                readers[graph.find(operand)].add(cls)
    todo = Waiting(needed)
    while todo:
        cls = todo.pop()
        for node in graph.nodes(cls):
            total = 1.0 + sum(size.get(graph.find(operand), math.inf) for operand in node.operands)
            if total < size.get(cls, math.inf):
                size[cls], chosen[cls] = total, node
                todo.add(readers[cls])
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
