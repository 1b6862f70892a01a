"""Costs of the matrix products of a graph on a GPU, from the kernel predictor.

    forward   one product (m, k) by (k, n)
    backward  a product for each input that needs a gradient: (m, n) by (n, k) and (k, m) by (m, n)

Recurrent layers multiply the inputs of all time steps at once and the states step by step. In the backward, gradients
of weights are computed for all steps at once (Appleyard et al., Optimizing Performance of Recurrent Neural Networks on
GPUs, 2016).

The measured rows are single products of activations and weights. A cost has the basis "regressed" if it depends only on
such products. Gradients (operands in other layouts) and batched products use the same library; they get the interval of
the same code on another device. Convolutions, estimated as implicit GEMMs, get the interval of other code on another
device (`OpModel.transfers`). `cost.gpu.gpu_products` corrects cases that the predictor does not cover. All other ops
keep their costs, and so do products whose sizes are invalid or whose dtype has no rate in the datasheet (`demand`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.cost.kernels.demand import has_rate, wrong_sizes
from meshwright.cost.kernels.kernel_model import Kernel, KernelModel
from meshwright.cost.roofline import RooflineSeconds
from meshwright.cost.work import read_work
from meshwright.cost.work.op_calls import OpCall, read_call
from meshwright.cost.work.work_count import time_steps
from meshwright.spec.units import ARITHMETIC_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.costs import Basis, Floats, OpCost, Predictions
    from meshwright.cost.gpu.gpu_products import ProductRates
    from meshwright.spec import DeviceKind, Graph, Op

# The relation of a kernel to the measured ones.
_Kinship = Literal["same", "near", "far"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One product to predict: its op, pass, multiplicity, and relation to measured ones.

    ``layer``: (m, n, k, count) of the forward. ``places``: those of an image of a convolution's output, 0 for others.
    """

    place: tuple[int, int]
    backward: bool
    kinship: _Kinship
    sizes: Mapping[str, float]
    dtype: str
    layer: tuple[float, float, float, float]
    times: float = 1.0
    places: float = 0.0
    is_point: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelQueries:
    """Ops of a graph at one batch size, with their costs before the kernel predictor is used.

    ``keys``: keys of the ops in the measurement table. ``types``: data types in which their products are computed.
    """

    costs: Sequence[OpCost]
    graph: Graph
    ops: Sequence[Op]
    keys: Sequence[str]
    types: Sequence[str]
    batch_size: int


def estimate_kernels(
    model: KernelModel, rates: ProductRates, asked: Sequence[KernelQueries], kind: DeviceKind
) -> list[list[OpCost]]:
    """Return the costs of ops, in which predictions of products replace rooflines, as one list for each of ``asked``.

    Costs of ops that the predictor does not cover are returned unchanged. All kernels are predicted together. ``rates``
    correct the predictions.
    """
    found = [list(some.costs) for some in asked]
    by_dtype: dict[str, list[_Call]] = defaultdict(list)
    for group, some in enumerate(asked):
        for place, (cost, op, key, dtype) in enumerate(zip(some.costs, some.ops, some.keys, some.types, strict=True)):
            if cost.basis == "roofline" and has_rate(kind, dtype):
                by_dtype[dtype] += _calls((group, place), cost, some.graph, op, key, dtype)
    parts: dict[tuple[int, int], list[tuple[_Call, Predictions, int]]] = defaultdict(list)
    for dtype, calls in by_dtype.items():
        # An op with an invalid kernel is left unchanged.
        odd = {calls[row].place for row in _odd_rows(calls)} if calls else set()
        known = [call for call in calls if call.place not in odd]
        if not known:
            continue
        predicted = model.predict(Kernel(op="matmul", dtype=dtype, device=kind), _columns(known))
        for row, call in enumerate(known):
            parts[call.place].append((call, predicted, row))
    for (group, place), rows in parts.items():
        found[group][place] = _gather(asked[group].costs[place], rows, model, rates, kind)
    return found


def _odd_rows(calls: Sequence[_Call]) -> list[int]:
    wrong = list(wrong_sizes(_columns(calls)).values())
    return np.flatnonzero(np.logical_or.reduce(wrong)).tolist() if wrong else []


def _columns(asked: Sequence[_Call]) -> dict[str, Floats]:
    return {size: np.array([call.sizes[size] for call in asked], np.float64) for size in asked[0].sizes}


def _calls(place: tuple[int, int], cost: OpCost, graph: Graph, op: Op, key: str, dtype: str) -> list[_Call]:
    work, call = read_work(key), read_call(key)
    if work is None or call is None or work.family not in ("product", "convolution", "recurrent"):
        return []
    trained = cost.seconds.backward_s > 0
    if work.family == "recurrent":
        return _recurrent_calls(place, call, dtype, trained=trained)
    m, n, k, count = (float(round(2.0**size)) for size in work.sizes)
    places, is_point = 0.0, False
    if work.family == "convolution":
        # Tensor cores load channels 16 bytes at a time: cuDNN pads other numbers (its developer guide).
        channels, whole = k / math.prod(call.shapes[1][2:]), 16 // ARITHMETIC_BYTES[dtype]
        k *= math.ceil(channels / whole) * whole / channels
        places, is_point = max(m / call.shapes[0][0], 1.0), math.prod(call.shapes[1][2:]) == 1
    sizes = [(m, n, k)]
    if trained:
        # One product per needed gradient; with a single one, it is that of the first input that has one.
        left, right = _wanted(graph, op)
        sizes += [(m, k, n)] * left + [(k, n, m)] * right
    kinship: _Kinship = "far" if work.family == "convolution" else "same" if count == 1 else "near"
    return [
        _Call(
            place=place,
            backward=index > 0,
            kinship="near" if index and kinship == "same" else kinship,
            sizes={"m": rows, "n": columns, "k": depth, "count": count},
            dtype=dtype,
            layer=(m, n, k, count),
            places=places,
            is_point=is_point,
        )
        for index, (rows, columns, depth) in enumerate(sizes)
    ]


def _recurrent_calls(place: tuple[int, int], call: OpCall, dtype: str, *, trained: bool) -> list[_Call]:
    """Return the products of a recurrent layer: inputs of all time steps at once, states step by step."""
    steps, batch = time_steps(call)
    matrices = [shape for shape in call.shapes if len(shape) == 2]
    found = []
    for given, held in zip(matrices[::2], matrices[1::2], strict=False):
        (gates, width), states, rows = given, held[1], steps * batch
        forward = [(rows, gates, width, 1), (batch, gates, states, steps)]
        backward = [(rows, width, gates, 1), (width, gates, rows, 1), (states, gates, rows, 1)]
        backward.append((batch, states, gates, steps))
        found += [(False, *sizes) for sizes in forward] + [(True, *sizes) for sizes in backward if trained]
    return [
        _Call(
            place=place,
            backward=is_backward,
            kinship="far",
            sizes={"m": float(m), "n": float(n), "k": float(k), "count": 1.0},
            dtype=dtype,
            layer=(m, n, k, 1.0),
            times=times,
        )
        for is_backward, m, n, k, times in found
    ]


def _wanted(graph: Graph, op: Op) -> tuple[bool, bool]:
    """Return whether the left and the right factor of a product need a gradient."""
    flags = [graph.tensors[index].requires_grad for index in op.inputs]
    first = 1 if op.kind.split(".")[1:2] in (["addmm"], ["baddbmm"]) else 0
    return flags[first], flags[first + 1]


def _gather(
    cost: OpCost,
    rows: list[tuple[_Call, Predictions, int]],
    model: KernelModel,
    rates: ProductRates,
    kind: DeviceKind,
) -> OpCost:
    """Return one cost from the kernels of its passes, without gradient accumulation."""
    basis: Basis = "regressed"
    sums = np.zeros((3, 2))
    for call, predicted, row in rows:
        seconds, low, high = (float(ends[row]) for ends in (predicted.seconds, predicted.low_s, predicted.high_s))
        if call.kinship != "same":
            wide = model.ops["matmul"].transfers[call.kinship]
            low, high = min(low, seconds * wide.low), max(high, seconds * wide.high)
        if call.kinship != "same" or predicted.basis[row] != "regressed":
            basis = "transferred"
        times = call.times * _factor(call, seconds, predicted.basis[row], rates, kind)
        sums[:, int(call.backward)] += times * np.array([seconds, low, high])
    found, lowest, highest = (
        RooflineSeconds(forward_s=float(forward), backward_s=float(backward), accumulate_s=0.0)
        for forward, backward in sums
    )
    return replace(cost, seconds=found, low=lowest, high=highest, basis=basis)


def _factor(call: _Call, seconds: float, basis: Basis, rates: ProductRates, kind: DeviceKind) -> float:
    """Return the factor by which a product takes longer than predicted."""
    if call.places:
        return rates.convolution_factor(call.places, call.dtype, is_point=call.is_point)
    if call.dtype == "float32" and basis == "transferred":
        return rates.float32_factor(call.layer[3])
    return max(rates.least_seconds(call.layer, call.dtype, kind, backward=call.backward) / seconds, 1.0)
