"""Seconds of ops from a trace of the user's own runs: rows of the profiler, without gradients and layers.

    forward    the row of the operator with these inputs; for a product the row ``matmul`` of its m, n, k
    backward   products: a row for each needed gradient, (m, k, n) of the left and (k, n, m) of the right factor
               others: the row of the operator that torch names as its backward, on a gradient of its output's shape

An op whose passes all have a row is `measured`. If only the forward has one, the backward is the roofline's times
measured / roofline of the forward: `transferred`. Gradient accumulation has no operator of its own in a trace: it is
the roofline times the same ratio. Source of the names: torch 2.13, tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.cost.roofline import RooflineSeconds
from meshwright.cost.traits import operator_name
from meshwright.records.table import parse_sizes
from meshwright.spec.units import FLOAT_DTYPES

if TYPE_CHECKING:
    from meshwright.cost.prediction import Basis
    from meshwright.records import Records
    from meshwright.spec import Graph, Op

# Operators whose backward in a trace consists of several operators.
_PARTS = {"cross_entropy_loss": ("nll_loss_backward", "_log_softmax_backward_data")}
# Torch's names for the backward of an operator: layer_norm → native_layer_norm_backward, softmax →
# _softmax_backward_data, embedding → embedding_dense_backward; attention's names its library.
_BACKWARD = "(?:native_|_)?{}(?:_dense)?_backward(?:_data)?"
_STEMS = {
    "scaled_dot_product_attention": "scaled_dot_product",
    "relu": "threshold",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "convolution"),
}
_REST = {"scaled_dot_product_attention": "_[a-z0-9_]*attention[a-z0-9_]*"}

Shapes = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedOps:
    """Rows of traces of one device: ``seconds`` by operator and inputs, ``products`` by dtype and (m, n, k).

    ``backwards``: for the operators of a backward, seconds by name and first input.
    """

    seconds: dict[tuple[str, Shapes], float] = field(default_factory=dict)
    products: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    backwards: dict[tuple[str, str], float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.seconds or self.products)

    def find(
        self, graph: Graph, op: Op, batch_size: int, dtype: str, bound: RooflineSeconds
    ) -> tuple[RooflineSeconds, Basis] | None:
        """Return the seconds of an op and their basis; None without a row of its forward. ``bound``: its roofline."""
        inputs = tuple(_input(graph, index, batch_size, dtype) for index in op.inputs)
        sizes = _product_sizes(graph, op, batch_size)
        name = operator_name(op)
        forward = self.seconds.get((name, inputs))
        if forward is None and sizes is not None:
            forward = self.products.get((dtype, *sizes))
        if forward is None:
            return None
        ratio = forward / bound.forward_s if bound.forward_s > 0 else 1.0
        accumulate = bound.accumulate_s * ratio
        if bound.backward_s <= 0:
            return RooflineSeconds(forward_s=forward, backward_s=0.0, accumulate_s=accumulate), "measured"
        if sizes is not None:
            backward = self._product_backward(graph, op, dtype, sizes)
        else:
            backward = self._backward(name, [_input(graph, index, batch_size, dtype) for index in op.outputs], inputs)
        basis: Basis = "transferred" if backward is None else "measured"
        seconds = bound.backward_s * ratio if backward is None else backward
        return RooflineSeconds(forward_s=forward, backward_s=seconds, accumulate_s=accumulate), basis

    def _product_backward(self, graph: Graph, op: Op, dtype: str, sizes: tuple[int, int, int]) -> float | None:
        m, n, k = sizes
        left, right = (graph.tensors[index].requires_grad for index in _factors(op))
        wanted = [(m, k, n)] * left + [(k, n, m)] * right
        found = [self._either_way(dtype, *product) for product in wanted]
        known = [seconds for seconds in found if seconds is not None]
        return math.fsum(known) if known and len(known) == len(found) else None

    def _either_way(self, dtype: str, m: int, n: int, k: int) -> float | None:
        """Return the time of a product or its transpose: torch writes the gradient of a transposed weight as (n, m)."""
        return self.products.get((dtype, m, n, k), self.products.get((dtype, n, m, k)))

    def _backward(self, name: str, outputs: list[str], inputs: Shapes) -> float | None:
        if name in _PARTS:
            parts = [self._part(part, (*outputs, *inputs)) for part in _PARTS[name]]
            known = [seconds for seconds in parts if seconds is not None]
            return math.fsum(known) if len(known) == len(parts) else None
        pattern = _BACKWARD.format(re.escape(_STEMS.get(name, name)) + _REST.get(name, ""))
        items = self.backwards.items()
        rows = ((seconds, shape) for (operator, shape), seconds in items if re.fullmatch(pattern, operator))
        found = (seconds for seconds, shape in rows if shape in outputs)
        return next(found, None)

    def _part(self, operator: str, shapes: tuple[str, ...]) -> float | None:
        found = (self.backwards.get((operator, shape)) for shape in shapes)
        return next((seconds for seconds in found if seconds is not None), None)


def collect_traced(rows: Records) -> TracedOps:
    """Return the rows of traces among rows of one device, without rows of captured ops, which name gradients."""
    traced = TracedOps()
    for op, shapes, dtype, seconds in zip(rows.op, rows.shapes, rows.dtype, rows.seconds.tolist(), strict=True):
        if seconds <= 0:
            continue
        if op == "matmul":
            sizes = parse_sizes(shapes) or {}
            if sizes.keys() == {"m", "n", "k"}:
                traced.products[dtype, sizes["m"], sizes["n"], sizes["k"]] = seconds
        elif op.startswith("aten.") and op.count(".") == 1 and shapes.endswith("|"):
            name, inputs = op.removeprefix("aten."), tuple(shapes[:-1].split(";")[0].split(","))
            traced.seconds[name, inputs] = seconds
            if "backward" in name:
                traced.backwards[name, inputs[0]] = seconds
    return traced


def _input(graph: Graph, index: int, batch_size: int, dtype: str) -> str:
    """Return a tensor in the notation of traces, with floating types at the model's precision."""
    tensor = graph.tensors[index]
    sizes = "x".join(str(extent.at(batch_size)) for extent in tensor.shape)
    return f"{sizes}:{dtype if tensor.dtype in FLOAT_DTYPES else tensor.dtype}"


def _factors(op: Op) -> tuple[int, int]:
    """Return the two factors of a product: after the summand, if there is one."""
    first = 1 if operator_name(op) == "addmm" else 0
    return op.inputs[first], op.inputs[first + 1]


def _product_sizes(graph: Graph, op: Op, batch_size: int) -> tuple[int, int, int] | None:
    """Return (m, n, k) of a product of two matrices, or of a linear layer; None for every other op."""
    name = operator_name(op)
    if name not in ("linear", "mm", "matmul", "addmm"):
        return None
    left, right = ([extent.at(batch_size) for extent in graph.tensors[index].shape] for index in _factors(op))
    if len(right) != 2 or len(left) < 2 or (len(left) > 2 and name != "linear"):
        return None
    rows, depth = math.prod(left[:-1]), left[-1]
    return (rows, right[0], depth) if name == "linear" else (rows, right[1], depth)
