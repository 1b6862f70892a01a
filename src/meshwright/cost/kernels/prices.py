"""Prices of the products and attentions of a graph on a GPU, by the predictor of kernels.

    forward   one product (m, k) by (k, n), or one fused attention
    backward  a product for each input that wants a gradient: (m, n) by (n, k) and (k, m) by (m, n); attention runs 2.5
              times the FLOPs of its forward and is taken to reach the same share of the peak

What was measured are products of activations and weights, one at a time, and causal attention, forward. A price is
`regressed` if it rests on nothing else. The same library at work on other layouts, on many products at once or without
a mask is as unsure as the same code on another device; convolutions, priced as the products that they are as implicit
GEMMs, and attention's backward as other code there (`OpModel.transfers`). Attention without a causal mask
takes the forward's time by its FLOPs. All else keeps the price that it has: also what no device can hold, and all in a
dtype of which the datasheet states no rate (`checks`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.cost.kernels.checks import has_rate, wrong_sizes
from meshwright.cost.kernels.demand import mean_keys
from meshwright.cost.kernels.model import Kernel
from meshwright.cost.prices import OpPrice
from meshwright.cost.roofline import OpSeconds
from meshwright.cost.work import ATTENTION_BACKWARD, read_work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.kernels.model import KernelModel
    from meshwright.cost.prediction import Basis, Floats, Interval, Predictions
    from meshwright.spec import DeviceKind, Graph, Op

_ATTENTION_DIMS = 4

# How a kernel is to those that were measured.
_Kinship = Literal["same", "near", "far"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One kernel to be asked for: of which op, in which pass, how often its seconds count, how like measured ones."""

    place: tuple[int, int]
    backward: bool
    times: float
    kinship: _Kinship
    op: str
    sizes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Ops of a graph at a batch size with their prices so far; ``keys`` are those in the measurement table."""

    prices: Sequence[OpPrice]
    graph: Graph
    ops: Sequence[Op]
    keys: Sequence[str]
    batch_size: int


def price_kernels(
    model: KernelModel, asked: Sequence[Asked], kind: DeviceKind, dtype: str, unsure: Interval
) -> list[list[OpPrice]]:
    """The prices of some ops, those that rest on a roofline replaced where the predictor knows the kernel.

    One list for each of ``asked``, whose kernels are predicted together. ``unsure``: the interval of what stays a
    roofline.
    """
    found = [list(some.prices) for some in asked]
    if not has_rate(kind, dtype):
        return found
    calls = [
        call
        for group, some in enumerate(asked)
        for place, (price, op, key) in enumerate(zip(some.prices, some.ops, some.keys, strict=True))
        if price.basis == "roofline"
        for call in _calls((group, place), price, some.graph, op, key, some.batch_size)
    ]
    by_op: dict[str, list[_Call]] = defaultdict(list)
    for call in calls:
        by_op[call.op].append(call)
    # An op of which one kernel cannot be is left alone.
    odd = {calls[row].place for calls in by_op.values() for row in _odd_rows(calls)}
    parts: dict[tuple[int, int], list[tuple[_Call, Predictions, int]]] = defaultdict(list)
    for name, calls in by_op.items():
        known = [call for call in calls if call.place not in odd]
        if name not in model.ops or not known:
            continue
        predicted = model.predict(Kernel(op=name, dtype=dtype, device=kind), _columns(known))
        for row, call in enumerate(known):
            parts[call.place].append((call, predicted, row))
    for (group, place), rows in parts.items():
        found[group][place] = _gather(asked[group].prices[place], rows, model, unsure)
    return found


def _odd_rows(calls: Sequence[_Call]) -> list[int]:
    wrong = list(wrong_sizes(_columns(calls)).values())
    return np.flatnonzero(np.logical_or.reduce(wrong)).tolist() if wrong else []


def _columns(asked: Sequence[_Call]) -> dict[str, Floats]:
    return {size: np.array([call.sizes[size] for call in asked], np.float64) for size in asked[0].sizes}


def _calls(place: tuple[int, int], price: OpPrice, graph: Graph, op: Op, key: str, batch_size: int) -> list[_Call]:
    work = read_work(key)
    if work is None or work.family not in ("product", "convolution", "attention"):
        return []
    if work.family == "attention":
        return _attention_calls(place, price, graph, op, batch_size)
    m, n, k, count = (float(round(2.0**size)) for size in work.sizes)
    sizes = [(m, n, k)]
    if price.seconds.backward_s > 0:
        # As many products as gradients are wanted; where one is, it is that of the first input that has one.
        left, right = _wanted(graph, op)
        sizes += [(m, k, n)] * left + [(k, n, m)] * right
    kinship: _Kinship = "far" if work.family == "convolution" else "same" if count == 1 else "near"
    return [
        _Call(
            place=place,
            backward=index > 0,
            times=1.0,
            kinship="near" if index and kinship == "same" else kinship,
            op="matmul",
            sizes={"m": rows, "n": columns, "k": depth, "count": count},
        )
        for index, (rows, columns, depth) in enumerate(sizes)
    ]


def _wanted(graph: Graph, op: Op) -> tuple[bool, bool]:
    """Whether the left and the right factor of a product want a gradient."""
    flags = [graph.tensors[index].requires_grad for index in op.inputs]
    first = 1 if op.kind.split(".")[1:2] in (["addmm"], ["baddbmm"]) else 0
    return flags[first], flags[first + 1]


def _attention_calls(place: tuple[int, int], price: OpPrice, graph: Graph, op: Op, batch_size: int) -> list[_Call]:
    shapes = [[extent.at(batch_size) for extent in graph.tensors[index].shape] for index in op.inputs[:2]]
    if any(len(shape) != _ATTENTION_DIMS for shape in shapes):
        return []
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = shapes
    causal = dict(op.attributes).get("is_causal") in (True, "True")
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "queries": queries, "keys": keys}
    name = "attention_decode" if queries == 1 else "attention_prefill"
    # Pairs of a query and a key over those that a causal mask leaves.
    left = float(mean_keys(*(np.array([float(number)]) for number in (queries, keys, 0)))[0])
    share = 1.0 if causal else keys / left
    passes: list[tuple[bool, float, _Kinship]] = [(False, share, "same" if share == 1 else "near")]
    if price.seconds.backward_s > 0:
        passes.append((True, share * ATTENTION_BACKWARD, "far"))
    columns = {**{size: float(number) for size, number in sizes.items()}, "window": 0.0}
    return [
        _Call(place=place, backward=backward, times=times, kinship=kinship, op=name, sizes=columns)
        for backward, times, kinship in passes
    ]


def _gather(
    price: OpPrice, rows: list[tuple[_Call, Predictions, int]], model: KernelModel, unsure: Interval
) -> OpPrice:
    """One price from the kernels of its passes; what adds gradients stays what it was."""
    basis: Basis = "regressed"
    sums = np.zeros((3, 2))
    for call, predicted, row in rows:
        seconds, low, high = (float(ends[row]) for ends in (predicted.seconds, predicted.low_s, predicted.high_s))
        if call.kinship != "same":
            shared = model.ops[call.op]
            wide = shared.transfers[call.kinship]
            low, high = min(low, seconds * wide.low), max(high, seconds * wide.high)
        if call.kinship != "same" or predicted.basis[row] != "regressed":
            basis = "transferred"
        sums[:, int(call.backward)] += call.times * np.array([seconds, low, high])
    found, lowest, highest = (
        OpSeconds(
            forward_s=float(forward), backward_s=float(backward), accumulate_s=price.seconds.accumulate_s * factor
        )
        for (forward, backward), factor in zip(sums, (1.0, unsure.low, unsure.high), strict=True)
    )
    return OpPrice(seconds=found, low=lowest, high=highest, basis=basis)
