"""The estimated seconds of one op (`estimate_op`), from the first available source.

The sources, which are the basis of the estimate, in this order:

    measured      the op's key is in the measurement table, or its forward and backward are in a trace of the user's
                  own runs
    interpolated  the same op was measured at smaller and larger batch sizes: linear between the nearest two
    regressed     ops of its family were measured: `cost.ops`
    transferred   the op's family is unknown, and it was measured at smaller or at larger batch sizes only: the nearest
                  time × (roofline at this size / roofline at that size); or only its forward is in a trace
    roofline      no similar op was measured; `cost.kernels` then estimates products and attention on GPUs

An entry of the table belongs to an op at batch size n if its key equals ``op_key(graph, op, n)``. The intervals contain
measured / predicted for four out of five ops (forward and backward) of those models in `validation.cpu_ops` that are
not scored. Each op is compared with its time in another model, between or next to other batch sizes, or with its
roofline. Rooflines of GPUs have their own interval. As no element-wise op or norm was measured on a GPU, this interval
is that of memory-bound products and their rooflines (`validation.kernels`, bfloat16), from the lowest 10 % to the
highest 90 % quantile of A100, H100, H200 and L40S.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.costs import Basis, Interval, OpCost, op_cost_around
from meshwright.cost.kernels import is_tiled
from meshwright.cost.ops import OpRegressor, fit_op_regressor
from meshwright.cost.roofline import RooflineSeconds, bound_op
from meshwright.cost.traits import operator_name
from meshwright.cost.work import key_in
from meshwright.records.record_table import parse_sizes
from meshwright.spec import DTYPE_BYTES, FLOAT_DTYPES, DeviceKind, Graph, Measurements, Op, OpMeasurement
from meshwright.spec.measurements import read_move_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from meshwright.cost.conversion_costs import Move
    from meshwright.records import Records


# For messages (bytes) and optimizer steps (elements), through measured points:
#
#     t(x) = linear between neighbouring points; t(smallest) below; the last segment's slope above
#
# Points are first made monotonic in size (running maximum), so that noise cannot make a larger size cheaper. On data of
# the form α + β·x the curve is exactly α + β·x from the smallest point on.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Seconds as a piecewise linear function of a size (bytes or elements), through measured points.

    ``sizes``, ascending, and ``seconds`` have shape (points,). Below the smallest size, the function is constant; above
    the largest, it has the last segment's slope.
    """

    sizes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    def at(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds at each of ``sizes``, in the same shape."""
        above: NDArray[np.float64] = np.maximum(sizes - self.sizes[-1], 0.0)
        return np.interp(sizes, self.sizes, self.seconds) + self._slope_above() * above

    def _slope_above(self) -> float:
        if len(self.sizes) == 1:
            return float(self.seconds[0] / self.sizes[0]) if self.sizes[0] else 0.0
        return float((self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2]))


def fit_curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Return the curve through one or more points (size, seconds); the seconds of equal sizes are averaged.

    Seconds that decrease with size are replaced by the running maximum.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(float(size), []).append(seconds)
    sizes = sorted(by_size)
    means = np.array([np.mean(by_size[size]) for size in sizes])
    return Curve(sizes=np.array(sizes), seconds=np.maximum.accumulate(means))


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


# Rows of the profiler, without gradients and layers:
#
#     forward    the row of the operator with these inputs; for a product the row ``matmul`` of its m, n, k
#     backward   products: a row for each needed gradient, (m, k, n) of the left and (k, n, m) of the right factor
#                others: the row of the operator that torch names as its backward, on a gradient of its output's shape
#
# An op whose passes all have a row is `measured`. If only the forward has one, the backward is the roofline's times
# measured / roofline of the forward: `transferred`. Gradient accumulation has no operator of its own in a trace: it is
# the roofline times the same ratio. Source of the names: torch 2.13, tools/autograd/derivatives.yaml.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedOps:
    """The operators in profiler traces of one device.

    ``seconds``: by operator name and inputs, written as in the trace. ``products``: seconds of matrix products by
    (dtype, m, n, k). ``backwards``: seconds of operators of backwards, by name and first input.
    """

    seconds: dict[tuple[str, Shapes], float] = field(default_factory=dict)
    products: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    backwards: dict[tuple[str, str], float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.seconds or self.products)

    def find(
        self, graph: Graph, op: Op, batch_size: int, dtype: str, bound: RooflineSeconds
    ) -> tuple[RooflineSeconds, Basis] | None:
        """Return the seconds of an op and their basis; None if its forward is not in the traces.

        ``bound``: the op's roofline, from which missing parts are scaled.
        """
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
    """Return the rows of one device that come from profiler traces; rows of captured ops are skipped."""
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


MEASURED = Interval(low=0.70, high=1.43)
INTERPOLATED = Interval(low=0.91, high=1.32)
TRANSFERRED = Interval(low=0.70, high=1.34)
ROOFLINE = Interval(low=0.81, high=8.85)
GPU_ROOFLINE = Interval(low=0.65, high=2.58)


class OpTable:
    """The measured ops of one measurement table, by key, op and batch size, for a model that computes in ``dtype``."""

    def __init__(self, measurements: Measurements, dtype: str) -> None:
        self._dtype = dtype
        self._rows = measurements.ops
        self._learned: dict[str, OpRegressor] = {}
        self._by_key: dict[str, OpMeasurement] = {}
        self._by_kind: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        self._moved = _moved_curves(measurements)
        for entry in measurements.ops:
            self._by_key[entry.key] = entry
            kind, _, rest = entry.key.partition("(")
            shapes = tuple(part.partition(":")[0] for part in re.split(r"[;|]", rest, maxsplit=1)[0].split(","))
            self._by_kind.setdefault(kind, []).append((shapes, entry.key))

    def key(self, graph: Graph, op: Op, batch_size: int) -> str:
        """Return the key of an op at a batch size in the table, in the table's dtype."""
        return key_in(self._dtype, graph, op, batch_size)

    def find(self, key: str) -> RooflineSeconds | None:
        """Return the measured seconds of the op with this key; None if it was not measured."""
        entry = self._by_key.get(key)
        if entry is None:
            return None
        return RooflineSeconds(forward_s=entry.forward_s, backward_s=entry.backward_s, accumulate_s=entry.accumulate_s)

    def spread(self, key: str) -> float:
        """Return (p90 - p10) / median of the measured forward of a key; raises KeyError if it was not measured."""
        return self._by_key[key].spread

    def issued(self, graph: Graph, op: Op, key: str) -> RooflineSeconds | None:
        """Return the measured seconds in which the host issues the op with this key, without gradient accumulation.

        If this key was not measured, the same op at another batch size is used; None if that is missing, too.
        """
        entry = self._by_key.get(key)
        if entry is None or not entry.forward_issue_s:
            others = (self._by_key[other] for other in self._measured_keys(graph, op).values())
            entry = next((other for other in others if other.forward_issue_s), None)
        if entry is None:
            return None
        return RooflineSeconds(forward_s=entry.forward_issue_s, backward_s=entry.backward_issue_s, accumulate_s=0.0)

    def moved(self, move: Move) -> float | None:
        """Return the measured seconds of a conversion or an addition of gradients; None if not measured."""
        curve = self._moved.get((move.read, move.written, move.adds))
        return None if curve is None else float(curve.at(np.array([move.elements], np.float64))[0])

    def learned(self, kind: DeviceKind) -> OpRegressor:
        """Return a regressor for ops that were not measured; it is fitted to the table's rows at the first call."""
        if kind.name not in self._learned:
            self._learned[kind.name] = fit_op_regressor(self._rows, kind, self._dtype)
        return self._learned[kind.name]

    def measured_batches(self, graph: Graph, op: Op) -> dict[int, RooflineSeconds]:
        """Return the measured times of an op by batch size, ascending; {} if its shapes do not depend on the batch."""
        keys = sorted(self._measured_keys(graph, op).items())
        entries = ((batch_size, self.find(key)) for batch_size, key in keys)
        return {batch_size: entry for batch_size, entry in entries if entry is not None}

    def _measured_keys(self, graph: Graph, op: Op) -> dict[int, str]:
        place = _batch_place(graph, op)
        if place is None:
            return {}
        tensor, dim = place
        extent = graph.tensors[op.inputs[tensor]].shape[dim]
        found: dict[int, str] = {}
        for shapes, key in self._by_kind.get(op.kind, ()):
            sizes = shapes[tensor].split("x") if tensor < len(shapes) else []
            if dim >= len(sizes) or not sizes[dim]:
                continue
            batch_size, rest = divmod(int(sizes[dim]) - extent.fixed, extent.per_sample)
            if rest == 0 and batch_size > 0 and self.key(graph, op, batch_size) == key:
                found[batch_size] = key
        return found


def _moved_curves(measurements: Measurements) -> dict[tuple[int, int, bool], Curve]:
    """Return seconds by elements of each measured conversion and sum, by bytes read and written per element."""
    points: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for entry in measurements.ops:
        move = read_move_key(entry.key)
        if move is not None and entry.forward_s and move.read in DTYPE_BYTES and move.written in DTYPE_BYTES:
            kind = (DTYPE_BYTES[move.read], DTYPE_BYTES[move.written], move.adds)
            points.setdefault(kind, []).append((float(move.elements), entry.forward_s))
    return {kind: fit_curve(measured) for kind, measured in points.items()}


def roofline_interval(kind: DeviceKind) -> Interval:
    """Return the interval of rooflines on a device kind, which differs between GPUs and CPUs."""
    return GPU_ROOFLINE if is_tiled(kind) else ROOFLINE


def estimate_op(
    graph: Graph,
    op: Op,
    batch_size: int,
    kind: DeviceKind,
    dtype: str,
    table: OpTable | None,
    traced: TracedOps | None = None,
    key: str = "",
    arithmetic: str = "",
) -> OpCost:
    """Return the seconds of one op, their interval and their basis (see the module's docstring).

    ``dtype``: the type in which the op computes; ``arithmetic``: the type in which it multiplies, if it differs.
    ``key``: the op's key, if already computed. ``table``: measured ops; without it (None), the result is the roofline.
    """
    key = key or key_in(dtype, graph, op, batch_size)
    bound = bound_op(graph, op, batch_size, kind, dtype, key, arithmetic)
    unsure = roofline_interval(kind)
    if table is None:
        return op_cost_around(bound, unsure, "roofline")
    exact = table.find(key)
    if exact is not None:
        # The spread of one run is less informative than another run would be: it can only widen the interval. Measured
        # ops are never less certain than rooflines.
        half = table.spread(key) / 2
        wide = Interval(low=max(min(MEASURED.low, 1 - half), 0.0), high=min(max(MEASURED.high, 1 + half), unsure.high))
        return op_cost_around(exact, wide, "measured")
    in_a_trace = traced.find(graph, op, batch_size, dtype, bound) if traced is not None else None
    if in_a_trace is not None:
        return op_cost_around(in_a_trace[0], MEASURED if in_a_trace[1] == "measured" else TRANSFERRED, in_a_trace[1])
    known = table.measured_batches(graph, op)
    if known and min(known) < batch_size < max(known):
        return op_cost_around(_between(batch_size, known), INTERPOLATED, "interpolated")
    learned = table.learned(kind)
    if learned.knows(key):
        return learned.estimate(key)
    if known:
        return op_cost_around(_beside(graph, op, batch_size, kind, dtype, known, bound), TRANSFERRED, "transferred")
    return op_cost_around(bound, unsure, "roofline")


def _between(batch_size: int, known: dict[int, RooflineSeconds]) -> RooflineSeconds:
    sizes = list(known)
    place = bisect_left(sizes, batch_size)
    low, high = sizes[place - 1], sizes[place]
    share = (batch_size - low) / (high - low)
    below, above = known[low], known[high]
    return RooflineSeconds(
        forward_s=below.forward_s + share * (above.forward_s - below.forward_s),
        backward_s=below.backward_s + share * (above.backward_s - below.backward_s),
        accumulate_s=below.accumulate_s + share * (above.accumulate_s - below.accumulate_s),
    )


def _beside(
    graph: Graph,
    op: Op,
    batch_size: int,
    kind: DeviceKind,
    dtype: str,
    known: dict[int, RooflineSeconds],
    here: RooflineSeconds,
) -> RooflineSeconds:
    nearest = min(known) if batch_size < min(known) else max(known)
    there = bound_op(graph, op, nearest, kind, dtype)
    ratios = (
        here.forward_s / there.forward_s if there.forward_s else 1.0,
        here.backward_s / there.backward_s if there.backward_s else 1.0,
        1.0,  # gradients of parameters do not depend on the batch
    )
    return known[nearest].scaled(*ratios)


def _batch_place(graph: Graph, op: Op) -> tuple[int, int] | None:
    """Return (input, dim) of the first input size that depends on the batch."""
    for position, tensor in enumerate(op.inputs):
        for dim, extent in enumerate(graph.tensors[tensor].shape):
            if extent.per_sample:
                return position, dim
    return None
