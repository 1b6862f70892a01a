"""What a choice of nodes is between: the classes that roots may need, and their nodes worth considering.

Most nodes of an e-graph are in no cheapest graph, which can be shown before the search:

- A class is *certain* where every graph of the roots holds it (dominators of an AND-OR graph: what a node needs is what
  all of its operands' ways need, what a class needs is what all of its nodes need in common).
- The *tree cost* of a class is what it takes at most: each node of its tree paid for, shared or not. Certain classes
  are there anyway, and cost nothing more; those that might need the class itself (of one strong component) are paid
  for, so that nobody counts on what is made of his own result.
- A node is a *detour* where all that read its class can read what it reads themselves, for no more: a slice of a slice.
- A node is *dominated* where another of its class, with the trees of all that only that one reads, costs less than the
  node alone: in any graph, it could take the node's place without a circle.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from meshwright.solving import strong_components

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set

    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.terms import TermNode

# Between graphs of equal cost, prefer fewer nodes, then fewer operands.
_PER_NODE, _PER_OPERAND = 1e-9, 1e-11

# Seconds of a tree that is never worth computing.
_ENDLESS = 1e100


def complexity(nodes: Iterable[TermNode]) -> float:
    """A tiny number of seconds that only breaks ties between equal costs."""
    return sum(_PER_NODE + _PER_OPERAND * len(node.operands) for node in nodes)


class Waiting:
    """A queue of classes, each contained once, first in, first out."""

    def __init__(self, classes: Iterable[int]) -> None:
        self._queue = deque(classes)
        self._inside = set(self._queue)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, classes: Iterable[int]) -> None:
        """Add classes that are not in the queue."""
        new = [cls for cls in dict.fromkeys(classes) if cls not in self._inside]
        self._queue.extend(new)
        self._inside.update(new)

    def pop(self) -> int:
        """The next class."""
        cls = self._queue.popleft()
        self._inside.discard(cls)
        return cls


class Option(NamedTuple):
    """A node of a class: its seconds, and the classes that it reads, except leaves."""

    seconds: float
    node: TermNode
    reads: frozenset[int]


class ClassOptions:
    """By class, the options that may be in a cheapest graph.

    ``seconds`` of a class and one of its nodes; infinity for nodes that must not be chosen. ``leaves`` cost nothing.
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
        """Classes that a node reads, except leaves."""
        return frozenset(map(self._graph.find, node.operands)) - self._leaves

    def follow(self, chosen: Mapping[int, TermNode]) -> dict[int, TermNode]:
        """The classes that the roots need under a choice, with their nodes."""
        nodes: dict[int, TermNode] = {}
        todo = list(self.roots)
        while todo:
            cls = todo.pop()
            if cls not in nodes:
                nodes[cls] = chosen[cls]
                todo += self.reads(nodes[cls])
        return nodes

    def parts(self) -> list[list[int]]:
        """Classes in groups that can be chosen independently of each other, except for cycles.

        A certain class is present in any case, so that only uncertain classes connect groups.
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
        """For each class the node of its cheapest tree: a choice without cycles, if not the cheapest one."""
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
        """The options of ``readers`` (class, position) for which a class needs this option: not a detour for them."""
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
