"""Constant folding: compute the values that do not depend on the batch once, and store them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from meshwright.rewrite.fx.write import write_graph
from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TOKEN_DTYPE, Terms

if TYPE_CHECKING:
    from meshwright.rewrite.fx.reading import ReadGraph


def fold_constants(
    terms: Terms, source: ReadGraph, effects: int | None, *, frozen: bool
) -> tuple[Terms, int | None, dict[str, torch.Tensor]]:
    """Return (graph in which stored tensors replace computed constants, its last token or None, tensors by name).

    The stored tensors are inputs of kind "constant". ``effects``: the last token of ``terms`` (the order of writes and
    random draws), or None. ``frozen``: parameters and buffers never change, so values computed from them are constant,
    too. Constants whose elements are all one number are not stored, because torch's calls accept numbers.
    """
    roots = (*terms.outputs, *(() if effects is None else (effects,)))
    needed = terms.needed(roots)
    constant = _constant(terms, needed, frozen=frozen)
    wanted = [
        term
        for term in needed
        if term in constant and terms.nodes[term].operator not in (INPUT, "broadcast") and not _is_number(terms, term)
    ]
    # A broadcast is a view of its operand, and is never folded.
    looks = {term for term in needed if terms.nodes[term].operator == "broadcast" or term not in constant}
    read = {operand for term in looks for operand in terms.nodes[term].operands} | set(roots)
    folded = [term for term in wanted if term in read]
    values = _compute(terms, source, folded)
    made = Terms()
    place: dict[int, int] = {}
    held: dict[str, torch.Tensor] = {}
    inside = set(folded)
    for term in _needed_around(terms, roots, inside):
        node, type_ = terms.nodes[term], terms.types[term]
        if term in inside:
            name = f"folded{len(held)}"
            held[name] = values[term]
            place[term] = made.input(name, type_, "constant")
        else:
            place[term] = made.add(node._replace(operands=tuple(place[operand] for operand in node.operands)), type_)
    made.outputs = tuple(place[output] for output in terms.outputs)
    return made, None if effects is None else place[effects], held


def _constant(terms: Terms, needed: list[int], *, frozen: bool) -> set[int]:
    constant: set[int] = set()
    for term in needed:
        node = terms.nodes[term]
        if node.operator == INPUT:
            kind = node.attribute("kind")
            fixed = kind == "constant" or (frozen and kind in ("parameter", "buffer"))
        else:
            ordered = node.operator in (OPAQUE, ITEM) and any(
                terms.types[other].dtype == TOKEN_DTYPE for other in (*node.operands, term)
            )
            fixed = not ordered and constant.issuperset(node.operands)
        if fixed:
            constant.add(term)
    return constant


def _is_number(terms: Terms, term: int) -> bool:
    node = terms.nodes[term]
    if node.operator == "full":
        return True
    return node.operator in ("broadcast", "reshape") and _is_number(terms, node.operands[0])


def _needed_around(terms: Terms, roots: tuple[int, ...], inside: set[int]) -> list[int]:
    """Terms that roots need when those ``inside`` are given."""
    marked: set[int] = set()
    todo = list(roots)
    while todo:
        term = todo.pop()
        if term not in marked:
            marked.add(term)
            todo += () if term in inside else terms.nodes[term].operands
    return sorted(marked)


def _compute(terms: Terms, source: ReadGraph, wanted: list[int]) -> dict[int, torch.Tensor]:
    if not wanted:
        return {}
    part = Terms()
    place: dict[int, int] = {}
    for term in terms.needed(wanted):
        node = terms.nodes[term]
        place[term] = part.add(node._replace(operands=tuple(place[i] for i in node.operands)), terms.types[term])
    part.outputs = tuple(place[term] for term in wanted)
    # They may share memory; they are copied below.
    shared = replace(source, fresh=(False,) * len(wanted))
    with torch.no_grad():
        results = write_graph(part, shared)(*_unused(source))
    # Operators are estimated for contiguous memory, and fastest there.
    contiguous = torch.contiguous_format
    return {term: result.detach().clone(memory_format=contiguous) for term, result in zip(wanted, results, strict=True)}


def _unused(source: ReadGraph) -> list[None]:
    """Placeholders for the batch, which constants do not read."""
    return [None for term in source.terms.inputs() if source.terms.nodes[term].attribute("kind") == "batch"]
