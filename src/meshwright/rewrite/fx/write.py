"""`Terms` → fx graph of ATen calls."""

from __future__ import annotations

import operator
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.capture.writes import written_and_aliased
from meshwright.rewrite.fx.aten_out import EMITTERS, AtenCall, number_of
from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TOKEN, TermNode
from meshwright.spec import RewriteError

aten = torch.ops.aten
# A maximum over several dims at once divides the gradient among equal maxima differently than one dim after the other.
_REDUCTIONS = ("sum", "mean")
_VIEWS = frozenset({"reshape", "transpose", "slice", "broadcast", "bitcast"})

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.rewrite.fx.read import ReadGraph
    from meshwright.rewrite.terms import Terms


def write_graph(
    terms: Terms, source: ReadGraph, *, effects: int | None = None, held: Mapping[str, torch.Tensor] | None = None
) -> fx.GraphModule:
    """The module that computes the outputs of terms.

    Its arguments are those of the graph that was read, used or not. ``effects``: the last token, in these terms;
    ``held``: tensors of inputs of kind "constant" that the read graph did not have.
    """
    return _Writing(terms, source, effects, held or {}).run()


class _Writing:
    def __init__(self, terms: Terms, source: ReadGraph, effects: int | None, held: Mapping[str, torch.Tensor]) -> None:
        self._terms, self._source, self._effects, self._held = terms, source, effects, held
        self.graph = fx.Graph()
        self._made: dict[int, Any] = {}
        self._root: dict[str, Any] = {}
        self._placeholders: dict[str, fx.Node] = {}
        self._pure: set[fx.Node] = set()
        self._readers: Counter[int] = Counter()

    def run(self) -> fx.GraphModule:
        source = self._source.terms
        for term in source.inputs():
            node = source.nodes[term]
            if node.attribute("kind") == "batch":
                name = str(node.attribute("name"))
                self._placeholders[name] = self.graph.placeholder(name)
        needed = self._terms.needed((*self._terms.outputs, *(() if self._effects is None else (self._effects,))))
        for term in needed:
            for operand in self._terms.nodes[term].operands:
                self._readers[operand] += 1
        for output in self._terms.outputs:
            self._readers[output] += 1
        for term in needed:
            self._emit(term)
        self.graph.output(tuple(map(self._output, range(len(self._terms.outputs)))))
        # Unread elements, and constants that calls take as numbers.
        for node in reversed(list(self.graph.nodes)):
            if (node.target is operator.getitem or node in self._pure) and not node.users:
                self.graph.erase_node(node)
        made = fx.GraphModule(self._root, self.graph, class_name="Rewritten")
        made.graph.lint()
        return made

    def _over_several(self, node: TermNode) -> TermNode:
        """A reduction of a reduction by the same operator as one reduction over several dims, as torch has it."""
        if node.operator not in _REDUCTIONS:
            return node
        axes, keep = [int(node.attribute("axis"))], bool(node.attribute("keep"))
        while True:
            (inner,) = node.operands
            below = self._terms.nodes[inner]
            if below.operator != node.operator or below.attribute("keep") != keep or self._readers[inner] > 1:
                break
            axis = int(below.attribute("axis"))
            # Dims after the reduced ones have moved forward.
            axes = [each if keep or each < axis else each + 1 for each in axes] + [axis]
            node = below
        if len(axes) == 1:
            return node
        return TermNode(node.operator, node.operands, (("axis", tuple(sorted(axes))), ("keep", keep)))

    def _output(self, place: int) -> Any:
        """An output; a copy if it would share memory with an input, attribute or other output, and must not."""
        term = self._terms.outputs[place]
        base = self._memory(term)
        shared = self._terms.nodes[base].operator == INPUT or any(
            self._memory(other) == base for i, other in enumerate(self._terms.outputs) if i != place
        )
        made = self._made[term]
        return self.graph.call_function(aten.clone.default, (made,)) if shared and self._source.fresh[place] else made

    def _memory(self, term: int) -> int:
        """The term whose memory a term may be a view of."""
        while self._terms.nodes[term].operator in _VIEWS:
            term = self._terms.nodes[term].operands[0]
        return term

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
            node = self._over_several(node)
            operands = tuple(self._made[operand] for operand in node.operands)
            numbers = tuple(number_of(self._terms, operand) for operand in node.operands)
            self._made[term] = emitter(AtenCall(self.graph, operands, numbers, dict(node.attributes), type_))
            self._pure.add(self._made[term])
            self._made[term].meta["declared"] = True

    def _laid_out(self, made: fx.Node, look: Any) -> fx.Node:
        """A value with the strides order of the graph that was read; no copy if it has that already."""
        if not isinstance(look, torch.Tensor) or look.ndim < 2:
            return made
        if look.is_contiguous():
            return self.graph.call_function(aten.contiguous.default, (made,))
        strides = look.stride()
        order = sorted(range(look.ndim), key=lambda dim: (-strides[dim], dim))
        if not look.permute(order).is_contiguous():
            return made
        moved = self.graph.call_function(aten.permute.default, (made, order))
        back = [order.index(dim) for dim in range(look.ndim)]
        dense = self.graph.call_function(aten.contiguous.default, (moved,))
        return self.graph.call_function(aten.permute.default, (dense, back))

    def _item(self, whole: int, place: int) -> fx.Node:
        copied, several = self._made[whole]
        return self.graph.call_function(operator.getitem, (copied, place)) if several else copied

    def _copy(self, term: int) -> Any:
        """An opaque call with the new operands; several results are fetched by items."""
        node = self._terms.nodes[term]
        call = self._source.calls[str(node.attribute("key"))]
        operands = iter([i for i in node.operands if self._terms.types[i] != TOKEN])
        taken: dict[fx.Node, Any] = {}
        written, aliased = written_and_aliased(call.target, call.args, call.kwargs, fx.Node)
        touched = {*written, *aliased} if self._terms.types[term] == TOKEN else set()

        def renew(leaf: fx.Node) -> Any:
            if leaf in taken:
                next(operands, None)
                return taken[leaf]
            if leaf.op == "get_attr" and not isinstance(self._source.holders[str(leaf.target)], torch.Tensor):
                name = str(leaf.target)
                self._root[name] = self._source.holders[name]
                taken[leaf] = self.graph.create_node("get_attr", name)
            else:
                made = self._made[next(operands)]
                # An unknown call may depend on memory layout; a copy must not replace memory that is written, or
                # viewed to be written.
                ours = made in self._pure and leaf not in touched
                taken[leaf] = self._laid_out(made, leaf.meta.get("val")) if ours else made
            return taken[leaf]

        args, kwargs = fx.node.map_arg(call.args, renew), fx.node.map_arg(call.kwargs, renew)
        made = self.graph.create_node("call_function", call.target, args, kwargs)
        if self._terms.types[term] != TOKEN:
            return made
        return made, isinstance(call.meta["val"], tuple | list)
