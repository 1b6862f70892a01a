"""Put terms into an e-graph (`load`); find classes that do not depend on the batch or are one number (`find_known`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.rewrite.egraph import EGraph
from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TOKEN_DTYPE, TermNode, Terms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set


_GIVEN = ("parameter", "buffer", "constant")


def load(
    terms: Terms, outputs: Sequence[int], finite: Set[str] = frozenset(), *, frozen: bool = False
) -> tuple[EGraph, dict[int, int]]:
    """Return an e-graph of the terms from which ``outputs`` are computed, and the class of each term.

    ``finite``: names of stored tensors that contain only finite numbers, now and later. ``frozen``: parameters and
    buffers never change (inference).
    """
    graph = EGraph()
    classes: dict[int, int] = {}
    for term in terms.needed(outputs):
        node = terms.nodes[term]
        operands = tuple(classes[operand] for operand in node.operands)
        classes[term] = graph.add(TermNode(node.operator, operands, node.attributes), terms.types[term])
        if node.operator == INPUT and node.attribute("name") in finite:
            graph.finite.add(classes[term])
        if node.operator == INPUT and _is_fixed(node, frozen):
            graph.constant.add(classes[term])
    return graph, classes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """Known facts about classes.

    ``constant``: the classes that do not depend on the batch, so that they are computed once. ``number``: the value of
    each class whose elements all have one known value.
    """

    constant: frozenset[int]
    number: Mapping[int, float]


def find_known(graph: EGraph, *, frozen: bool) -> ClassFacts:
    """Return which classes are constant or one number; ``frozen``: parameters and buffers never change (inference)."""
    constant: set[int] = set()
    number: dict[int, float] = {}
    readers: dict[int, set[int]] = {}
    todo = set()
    for cls in graph.classes():
        for node in graph.nodes(cls):
            for operand in node.operands:
                readers.setdefault(graph.find(operand), set()).add(cls)
            if not node.operands:
                todo.add(cls)
    while todo:
        cls = todo.pop()
        grown = False
        for node in graph.nodes(cls):
            if cls not in constant and _is_constant(graph, cls, node, constant, frozen):
                constant.add(cls)
                grown = True
            value = number.get(cls, _number(graph, node, number))
            if value is not None and cls not in number:
                number[cls] = value
                grown = True
        if grown:
            todo |= readers.get(cls, set())
    return ClassFacts(constant=frozenset(constant), number=number)


def _is_constant(graph: EGraph, home: int, node: TermNode, constant: set[int], frozen: bool) -> bool:
    if node.operator == INPUT:
        return _is_fixed(node, frozen)
    if node.operator in (OPAQUE, ITEM) and any(
        graph.types[graph.find(cls)].dtype == TOKEN_DTYPE for cls in (*node.operands, home)
    ):
        # Ordered, or one of several results.
        return False
    return all(graph.find(operand) in constant for operand in node.operands)


def _is_fixed(node: TermNode, frozen: bool) -> bool:
    kind = dict(node.attributes).get("kind")
    return kind == "constant" or (frozen and kind in _GIVEN)


def _number(graph: EGraph, node: TermNode, number: dict[int, float]) -> float | None:
    if node.operator == "full":
        return float(node.attribute("value"))
    if node.operator in ("broadcast", "reshape"):
        return number.get(graph.find(node.operands[0]))
    return None


def is_token(graph: EGraph, cls: int) -> bool:
    """Return whether a class is not a tensor: a token that orders effects, or a tuple of several results."""
    return graph.types[cls].dtype == TOKEN_DTYPE
