"""Write `Terms` as an fx graph of ATen calls (`write_graph`); `EMITTERS` has one emitter per declared operator."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx

from meshwright.capture.call_facts import written_and_aliased
from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TOKEN, TensorType, TermNode, Terms
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from meshwright.rewrite.fx.reading import ReadGraph


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One operator to write as an ATen call: what an emitter receives.

    ``x``: the operands, as fx nodes. ``numbers``: per operand, its value if all its elements are one known number, else
    None. ``a``: the attributes by name. ``type``: the type of the result.
    """

    graph: fx.Graph
    x: tuple[Any, ...]
    numbers: tuple[float | None, ...]
    a: dict[str, Any]
    type: TensorType

    def to(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of ``target`` to the graph; return its node."""
        return self.graph.call_function(target, args, kwargs)

    def operand(self, place: int) -> Any:
        """Return the operand at position ``place``; None if the call has fewer operands."""
        return self.x[place] if place < len(self.x) else None


# An emitter gets an `AtenCall`, with the operands as nodes, the attributes and the result's type, and adds one ATen
# call.
Emitter: TypeAlias = "Callable[[AtenCall], fx.Node]"


def number_of(terms: Terms, term: int) -> float | None:
    """Return the value of a term whose elements are all one known number; None for any other term."""
    node = terms.nodes[term]
    if node.operator == "full":
        return float(node.attribute("value"))
    if node.operator in ("broadcast", "reshape"):
        return number_of(terms, node.operands[0])
    return None


def _plain(target: Any) -> Emitter:
    return lambda c: c.to(target, *c.x)


def _with_number(tensor: Any, scalar: Any, turned: Any = None) -> Emitter:
    """An operator of two operands, one of which may be a number; ``turned`` takes a number that stands first."""

    def emit(c: AtenCall) -> fx.Node:
        one, two = c.numbers
        if two is not None and one is None:
            return c.to(scalar, c.x[0], two)
        if one is not None and two is None and turned is not None:
            return c.to(turned, c.x[1], one)
        return c.to(tensor, *c.x)

    return emit


def _matmul(c: AtenCall) -> fx.Node:
    one, other = c.x
    is_turned = other.op == "call_function" and other.target is aten.permute.default
    order: list[int] = list(other.args[1]) if is_turned else []
    if len(order) == 4 and order[-1] != 3:
        # Two transposes, as in hand-written attention: heads first, then keys. Inductor (torch 2.13) takes a single
        # transpose for one of its patterns, and fails on the shapes.
        heads = c.to(aten.permute.default, other.args[0], [*order[:2], order[3], order[2]])
        other = c.to(aten.permute.default, heads, [0, 1, 3, 2])
    return c.to(aten.matmul.default, one, other)


def _over_axis(target: Any) -> Emitter:
    return lambda c: c.to(target, c.x[0], c.a["axis"])


def _reduced(target: Any) -> Emitter:
    return lambda c: c.to(
        target, c.x[0], list(c.a["axis"]) if isinstance(c.a["axis"], tuple) else [c.a["axis"]], c.a["keep"]
    )


def _convolution(target: Any) -> Emitter:
    return lambda c: c.to(
        target,
        *(c.x[0], c.x[1], c.operand(2)),
        *(list(c.a["stride"]), list(c.a["padding"]), list(c.a["dilation"]), c.a["groups"]),
    )


def _pool(target: Any) -> Emitter:
    return lambda c: c.to(target, c.x[0], list(c.a["kernel"]), list(c.a["stride"]), list(c.a["padding"]))


def _batch_norm(c: AtenCall) -> fx.Node:
    value, mean, variance, weight, bias = c.x
    return c.to(aten.batch_norm.default, value, weight, bias, mean, variance, False, 0.0, c.a["eps"], False)


def _pad(c: AtenCall) -> fx.Node:
    sides = [side for pair in zip(c.a["low"][::-1], c.a["high"][::-1], strict=True) for side in pair]
    return c.to(aten.constant_pad_nd.default, c.x[0], sides)


def _attention(c: AtenCall) -> fx.Node:
    target = aten.scaled_dot_product_attention.default
    return c.to(target, *c.x[:3], c.operand(3), 0.0, c.a["causal"], scale=c.a["scale"])


_NAMED_ALIKE = (
    *("exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "erf", "sin", "cos", "sigmoid", "sign", "floor", "ceil"),
    *("round", "neg", "relu", "abs", "silu", "maximum", "minimum", "logical_not", "logical_and", "square"),
    *("linear", "gelu", "embedding"),
)

EMITTERS: dict[str, Emitter] = {
    **{name: _plain(getattr(aten, name).default) for name in _NAMED_ALIKE},
    "matmul": _matmul,
    "where": _plain(aten.where.self),
    "gelu_tanh": lambda c: c.to(aten.gelu.default, *c.x, approximate="tanh"),
    "add": _with_number(aten.add.Tensor, aten.add.Scalar, aten.add.Scalar),
    "mul": _with_number(aten.mul.Tensor, aten.mul.Scalar, aten.mul.Scalar),
    "sub": _with_number(aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar),
    "div": _with_number(aten.div.Tensor, aten.div.Scalar),
    "pow": _with_number(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar),
    "greater": _with_number(aten.gt.Tensor, aten.gt.Scalar, aten.lt.Scalar),
    "less": _with_number(aten.lt.Tensor, aten.lt.Scalar, aten.gt.Scalar),
    "less_equal": _with_number(aten.le.Tensor, aten.le.Scalar, aten.ge.Scalar),
    "equal": _with_number(aten.eq.Tensor, aten.eq.Scalar, aten.eq.Scalar),
    "clamp": lambda c: c.to(aten.clamp.default, c.x[0], c.a["low"], c.a["high"]),
    "cast": lambda c: c.to(aten.to.dtype, c.x[0], getattr(torch, c.a["dtype"])),
    "bitcast": lambda c: c.to(aten.view.dtype, c.x[0], getattr(torch, c.a["dtype"])),
    "full": lambda c: c.to(aten.full.default, list(c.a["shape"]), c.a["value"], dtype=torch.float32),
    "conv1d": _convolution(aten.conv1d.default),
    "conv2d": _convolution(aten.conv2d.default),
    "attention": _attention,
    "sum": _reduced(aten.sum.dim_IntList),
    "mean": _reduced(aten.mean.dim),
    "variance": lambda c: c.to(aten.var.correction, c.x[0], [c.a["axis"]], correction=0, keepdim=c.a["keep"]),
    "amax": _reduced(aten.amax.default),
    "amin": _reduced(aten.amin.default),
    "softmax": _over_axis(aten.softmax.int),
    "log_softmax": _over_axis(aten.log_softmax.int),
    "layer_norm": lambda c: c.to(
        aten.layer_norm.default, c.x[0], [c.type.shape[-1]], c.operand(1), c.operand(2), c.a["eps"]
    ),
    "rms_norm": lambda c: c.to(aten.rms_norm.default, c.x[0], [c.type.shape[-1]], c.operand(1), c.a["eps"]),
    "group_norm": lambda c: c.to(
        aten.group_norm.default, c.x[0], c.a["groups"], c.operand(1), c.operand(2), c.a["eps"]
    ),
    "batch_norm": _batch_norm,
    "max_pool2d": _pool(aten.max_pool2d.default),
    "avg_pool2d": _pool(aten.avg_pool2d.default),
    "concat": lambda c: c.to(aten.cat.default, list(c.x), c.a["axis"]),
    "slice": lambda c: c.to(aten.slice.Tensor, c.x[0], c.a["axis"], c.a["start"], c.a["stop"]),
    "transpose": lambda c: c.to(aten.permute.default, c.x[0], list(c.a["order"])),
    "reshape": lambda c: c.to(aten.reshape.default, c.x[0], list(c.a["shape"])),
    "broadcast": lambda c: c.to(aten.expand.default, c.x[0], list(c.a["shape"])),
    "pad": _pad,
    "reverse": lambda c: c.to(aten.flip.default, c.x[0], [c.a["axis"]]),
}


# A maximum over several dims at once divides the gradient among equal maxima differently than one dim after the other.
_REDUCTIONS = ("sum", "mean")
_VIEWS = frozenset({"reshape", "transpose", "slice", "broadcast", "bitcast"})


def write_graph(
    terms: Terms, source: ReadGraph, *, effects: int | None = None, held: Mapping[str, torch.Tensor] | None = None
) -> fx.GraphModule:
    """Return a module that computes the outputs of ``terms``.

    The module has the arguments of the graph that was read (``source``), even if they are unused. ``effects``: the last
    token in ``terms``, whose writes and random draws are kept; None: no such calls. ``held``: by name, tensors of
    "constant" inputs that ``source`` does not have. Raises RewriteError for an operator without an ATen equivalent.
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
                raise RewriteError(
                    f"torch has no equivalent of the operator {node.operator!r}; do not use rules that produce it."
                )
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
