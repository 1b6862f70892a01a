"""`Terms` → fx graph of ATen calls."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.rewrite.fx.aten_out import EMITTERS, Call, number_of
from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TOKEN
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.rewrite.fx.read import Source
    from meshwright.rewrite.terms import Terms


def write_graph(
    terms: Terms, source: Source, *, effects: int | None = None, held: Mapping[str, torch.Tensor] | None = None
) -> fx.GraphModule:
    """The module that computes the outputs of terms.

    Its arguments are those of the graph that was read, used or not. ``effects``: the last token, in these terms;
    ``held``: tensors of inputs of kind "constant" that the read graph did not have.
    """
    return _Writing(terms, source, effects, held or {}).run()


class _Writing:
    def __init__(self, terms: Terms, source: Source, effects: int | None, held: Mapping[str, torch.Tensor]) -> None:
        self._terms, self._source, self._effects, self._held = terms, source, effects, held
        self.graph = fx.Graph()
        self._made: dict[int, Any] = {}
        self._root: dict[str, Any] = {}
        self._placeholders: dict[str, fx.Node] = {}
        self._pure: set[fx.Node] = set()

    def run(self) -> fx.GraphModule:
        source = self._source.terms
        for term in source.inputs():
            node = source.nodes[term]
            if node.attribute("kind") == "batch":
                name = str(node.attribute("name"))
                self._placeholders[name] = self.graph.placeholder(name)
        needed = self._terms.needed((*self._terms.outputs, *(() if self._effects is None else (self._effects,))))
        for term in needed:
            self._emit(term)
        self.graph.output(tuple(self._made[term] for term in self._terms.outputs))
        # Elements that nobody reads, and constants that calls take as numbers.
        for node in reversed(list(self.graph.nodes)):
            if (node.target is operator.getitem or node in self._pure) and not node.users:
                self.graph.erase_node(node)
        made = fx.GraphModule(self._root, self.graph, class_name="Rewritten")
        made.graph.lint()
        return made

    def _emit(self, term: int) -> None:
        node, type_ = self._terms.nodes[term], self._terms.types[term]
        if node.operator == INPUT:
            name = str(node.attribute("name"))
            if node.attribute("kind") == "batch":
                self._made[term] = self._placeholders[name]
            else:
                self._root[name] = self._held[name] if name in self._held else self._source.holders[name]
                self._made[term] = self.graph.create_node("get_attr", name)
        elif node.operator == OPAQUE:
            self._made[term] = self._copy(term)
        elif node.operator == ITEM:
            (whole,) = node.operands
            if type_ != TOKEN:
                self._made[term] = self._item(whole, int(node.attribute("place")))
        else:
            emitter = EMITTERS.get(node.operator)
            if emitter is None:
                raise RewriteError(f"Torch has no operator for {node.operator!r}; a rule that makes it cannot be used.")
            operands = tuple(self._made[operand] for operand in node.operands)
            numbers = tuple(number_of(self._terms, operand) for operand in node.operands)
            self._made[term] = emitter(Call(self.graph, operands, numbers, dict(node.attributes), type_))
            self._pure.add(self._made[term])

    def _item(self, whole: int, place: int) -> fx.Node:
        copied, several = self._made[whole]
        return self.graph.call_function(operator.getitem, (copied, place)) if several else copied

    def _copy(self, term: int) -> Any:
        """An opaque call at the new operands; its results are fetched by items if there are several."""
        node = self._terms.nodes[term]
        call = self._source.calls[str(node.attribute("key"))]
        operands = iter([i for i in node.operands if self._terms.types[i] != TOKEN])
        taken: dict[fx.Node, Any] = {}

        def renew(leaf: fx.Node) -> Any:
            if leaf in taken:
                next(operands, None)
                return taken[leaf]
            if leaf.op == "get_attr" and not isinstance(self._source.holders[str(leaf.target)], torch.Tensor):
                name = str(leaf.target)
                self._root[name] = self._source.holders[name]
                taken[leaf] = self.graph.create_node("get_attr", name)
            else:
                taken[leaf] = self._made[next(operands)]
            return taken[leaf]

        args, kwargs = fx.node.map_arg(call.args, renew), fx.node.map_arg(call.kwargs, renew)
        made = self.graph.create_node("call_function", call.target, args, kwargs)
        if self._terms.types[term] != TOKEN:
            return made
        return made, isinstance(call.meta["val"], tuple | list)
