"""Emitters: declared operators as ATen calls.

An emitter gets an `AtenCall`, with the operands as nodes, the attributes and the result's type, and adds one ATen
call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx

if TYPE_CHECKING:
    from meshwright.rewrite.terms import TensorType, Terms

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One operator to write: ``x`` operands, ``numbers`` operands that are one number everywhere, ``a`` attributes."""

    graph: fx.Graph
    x: tuple[Any, ...]
    numbers: tuple[float | None, ...]
    a: dict[str, Any]
    type: TensorType

    def to(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """The ATen call."""
        return self.graph.call_function(target, args, kwargs)

    def operand(self, place: int) -> Any:
        """An optional operand."""
        return self.x[place] if place < len(self.x) else None


Emitter: TypeAlias = "Callable[[AtenCall], fx.Node]"


def number_of(terms: Terms, term: int) -> float | None:
    """The number that a constant term has at every index."""
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
