"""`EGraph`: an e-graph, which holds many equal graphs at once.

A class (e-class) holds nodes that compute the same tensor. The operands of a node are classes. The data structure is
that of Nelson and Oppen with egg's deferred rebuilding (Willsey et al., POPL 2021). No library is used because rules
are conditional on types: the operators' declarations, which are Python functions, decide whether an operator accepts
its operands. Every class has a type (shape and dtype), and ill-typed nodes are never added.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TensorType, TermNode, type_of

if TYPE_CHECKING:
    from collections.abc import Iterator


# Operators whose results are finite where their operands are (short of overflow).
_STAYS_FINITE = frozenset(
    {"add", "sub", "mul", "neg", "square", "maximum", "minimum", "relu", "abs", "tanh", "sigmoid", "clamp"}
    | {"concat", "slice", "transpose", "reshape", "broadcast", "pad", "reverse", "matmul", "linear", "conv1d", "conv2d"}
    | {"sum", "mean", "amax", "amin", "avg_pool2d", "softmax", "sin", "cos", "erf"}
)


def _stays_finite(node: TermNode) -> bool:
    if node.operator == "full":
        return math.isfinite(node.attribute("value"))
    return node.operator in _STAYS_FINITE


class EGraph:
    """An e-graph. A class is a whole number; after a merge, `find` maps the old number to the merged class."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self.types: list[TensorType] = []
        self._known: dict[TermNode, int] = {}
        # By class: when it was first made, and how.
        self._earliest: list[tuple[int, TermNode]] = []
        # By class: nodes by operator, and the nodes that read it, with their classes.
        self._nodes: list[dict[str, list[TermNode]]] = []
        self._readers: list[list[tuple[TermNode, int]]] = []
        # Classes that hold a node of an operator; some of them merged away.
        self._holding: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._dirty: list[int] = []
        self.num_unions = 0
        # Classes that got a node or were merged, in the order of events.
        self._events: list[int] = []
        # Classes known to contain finite numbers only.
        self.finite: set[int] = set()
        # Classes that do not depend on the batch.
        self.constant: set[int] = set()
        # The current reason for adding nodes, and the reason of each node.
        self.reason = ""
        self._reasons: list[tuple[int, TermNode, str]] = []
        # Merged classes, with the reason.
        self._united: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._known)

    def find(self, cls: int) -> int:
        """Return the class into which ``cls`` was merged; ``cls`` itself if it was not merged."""
        parent = self._parent
        while parent[cls] != cls:
            parent[cls] = parent[parent[cls]]
            cls = parent[cls]
        return cls

    def classes(self) -> Iterator[int]:
        """Yield all classes that were not merged into another."""
        return (cls for cls, parent in enumerate(self._parent) if cls == parent)

    def nodes(self, cls: int) -> Iterator[TermNode]:
        """Yield all nodes of a class."""
        for nodes in self._nodes[cls].values():
            yield from nodes

    def earliest(self, cls: int) -> TermNode:
        """Return the node of a class that was added first; computing every class by its first node has no cycles."""
        return self._earliest[self.find(cls)][1]

    def age(self, cls: int) -> int:
        """Return the lowest (oldest) number of all classes that were merged into this one."""
        return self._earliest[self.find(cls)][0]

    def nodes_of(self, cls: int, operator: str) -> list[TermNode]:
        """Return the nodes of a class that apply ``operator``."""
        return self._nodes[cls].get(operator, [])

    def holding(self, operator: str) -> list[int]:
        """Return the classes that have a node of ``operator``."""
        found = dict.fromkeys(self.find(cls) for cls in self._holding[operator])
        self._holding[operator] = dict.fromkeys(found)
        return list(found)

    @property
    def now(self) -> int:
        """The number of changes so far (classes added or merged); pass it to `changed` later."""
        return len(self._events)

    def changed(self, since: int, levels: int) -> list[set[int]]:
        """Return ``levels + 1`` sets of classes: ``[0]`` those that changed after ``since``, a former value of `now`.

        Set ``i + 1`` adds to set ``i`` the classes with a node that has a class of set ``i`` as an operand.
        """
        found = [{self.find(cls) for cls in self._events[since:]}]
        for _ in range(levels):
            below = found[-1]
            found.append(below.union(*({self.find(home) for _, home in self._readers[cls]} for cls in below)))
        return found

    def readers(self, cls: int) -> Iterator[tuple[TermNode, int]]:
        """Yield (node, its class) for each node that has ``cls`` as an operand."""
        return ((node, self.find(home)) for node, home in self._readers[self.find(cls)])

    def lookup(self, node: TermNode) -> int | None:
        """Return the class of a node; None if the e-graph does not contain the node."""
        found = self._known.get(self._canonical(node))
        return None if found is None else self.find(found)

    def add(self, node: TermNode, type_: TensorType | None = None) -> int:
        """Return the class of a node, created if needed; ``type_`` is computed by default.

        Raises IllTypedError if the operator does not accept the operands.
        """
        node = self._canonical(node)
        found = self._known.get(node)
        if found is not None:
            return self.find(found)
        if type_ is None:
            type_ = type_of(node, [self.types[cls] for cls in node.operands])
        cls = len(self._parent)
        self._parent.append(cls)
        self.types.append(type_)
        self._nodes.append({node.operator: [node]})
        self._readers.append([])
        self._known[node] = cls
        self._earliest.append((cls, node))
        self._holding[node.operator][cls] = None
        self._events.append(cls)
        if _stays_finite(node) and self.finite.issuperset(node.operands):
            self.finite.add(cls)
        if node.operator not in (INPUT, OPAQUE, ITEM) and self.constant.issuperset(node.operands):
            self.constant.add(cls)
        if self.reason:
            self._reasons.append((cls, node, self.reason))
        for operand in set(node.operands):
            self._readers[operand].append((node, cls))
        return cls

    def reasons(self) -> dict[tuple[int, TermNode], str]:
        """Return the reason (``reason`` at the time, a rule's name) of each (class, node) that was added with one."""
        found: dict[tuple[int, TermNode], str] = {}
        for cls, node, reason in self._reasons:
            found.setdefault((self.find(cls), self._canonical(node)), reason)
        return found

    def united(self) -> list[tuple[int, str]]:
        """Return (class, reason) of each merge that was made with a reason (a rule's name)."""
        return [(self.find(cls), reason) for cls, reason in self._united]

    def merge(self, one: int, other: int) -> int:
        """Merge two classes; return the merged class.

        `rebuild` later merges the classes of nodes that become equal by it (congruence). Raises ValueError if the
        types of the two classes differ.
        """
        one, other = self.find(one), self.find(other)
        if one == other:
            return one
        if self.types[one] != self.types[other]:
            raise ValueError(f"classes of the types {self.types[one]} and {self.types[other]} cannot be merged")
        if len(self._readers[one]) < len(self._readers[other]):
            one, other = other, one
        self._parent[other] = one
        self.num_unions += 1
        if self.reason:
            self._united.append((one, self.reason))
        if other in self.finite:
            self.finite.discard(other)
            self.finite.add(one)
        if other in self.constant:
            self.constant.discard(other)
            self.constant.add(one)
        for operator, nodes in self._nodes[other].items():
            self._nodes[one].setdefault(operator, []).extend(nodes)
            self._holding[operator][one] = None
        self._nodes[other] = {}
        self._earliest[one] = min(self._earliest[one], self._earliest[other])
        self._dirty.append(one)
        self._events.append(one)
        self._readers[one].extend(self._readers[other])
        self._readers[other] = []
        return one

    def rebuild(self) -> None:
        """Merge the classes of nodes that became equal by merges of their operands (congruence closure)."""
        self.reason = ""
        touched = set()
        while self._dirty:
            todo, self._dirty = {self.find(cls) for cls in self._dirty}, []
            for cls in todo:
                self._repair(self.find(cls))
                touched.add(cls)
        for cls in {self.find(cls) for cls in touched}:
            self._tidy(cls)

    def _canonical(self, node: TermNode) -> TermNode:
        operands = node.operands
        found = tuple([self.find(cls) for cls in operands])
        return node if found == operands else node._replace(operands=found)

    def _repair(self, cls: int) -> None:
        readers, self._readers[cls] = self._readers[cls], []
        kept: dict[TermNode, int] = {}
        for node, home in readers:
            if node in self._known:
                del self._known[node]
            new = self._canonical(node)
            there = kept.get(new, self._known.get(new))
            if there is not None and self.find(there) != self.find(home):
                self.merge(there, home)
            self._known[new] = kept[new] = self.find(home)
        self._readers[self.find(cls)].extend(kept.items())

    def _tidy(self, cls: int) -> None:
        """Update a class's own nodes, and those that read it."""
        for home in {self.find(home) for _, home in self._readers[cls]} | {cls}:
            nodes: dict[str, dict[TermNode, None]] = {}
            for operator, held in self._nodes[home].items():
                nodes[operator] = dict.fromkeys(map(self._canonical, held))
            self._nodes[home] = {operator: list(held) for operator, held in nodes.items()}
