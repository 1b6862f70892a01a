"""Mixtures of experts with a fixed capacity, computed together as batched products, as `zoo.mixtral` has them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshwright.templates.builder import B, GraphBuilder, OwnOutput, times
from meshwright.templates.modules import (
    activation,
    add,
    batched_product,
    linear,
    look,
    multiply,
    scale,
    token_cross_entropy,
    transpose,
)

if TYPE_CHECKING:
    from meshwright.templates.builder import Shape
    from meshwright.templates.shapes import ExpertLayers

# router_aux_loss_coef of Mixtral's configuration.
_BALANCE = 0.02


def start_balance(graph: GraphBuilder, value: int) -> int:
    """The balance loss before the first layer: (batch,) zeros."""
    (out,) = graph.op("aten.new_zeros.default", (value,), (B,), attributes={"size": "[b]"}, detached=True)
    return out


def mix_experts(graph: GraphBuilder, experts: ExpertLayers, value: int, capacity_factor: float) -> tuple[int, int]:
    """What the chosen experts make of each token, and the balance loss of each sequence."""
    tokens, count, chosen = graph.shape(value)[1].fixed, experts.num_experts, experts.top_k
    room = min(tokens, math.ceil(capacity_factor * chosen * tokens / count))
    with graph.within("router"):
        places, weights, balance = _route(graph, experts, value, room)
    with graph.within("experts"):
        return _compute(graph, experts, value, places, weights, room), balance


def balanced_loss(graph: GraphBuilder, logits: int, targets: int, balance: int, layers: int) -> int:
    """The cross-entropy of the tokens, and a little of the balance loss."""
    mean = scale(graph, "div", balance, layers)
    with graph.within("loss"):
        loss = token_cross_entropy(graph, logits, targets)
        (whole,) = graph.op("aten.mean.default", (mean,), ())
        return add(graph, loss, scale(graph, "mul", whole, _BALANCE))


def _route(graph: GraphBuilder, experts: ExpertLayers, value: int, room: int) -> tuple[int, int, int]:
    tokens, count, chosen = graph.shape(value)[1].fixed, experts.num_experts, experts.top_k
    scores = linear(graph, "gate", value, count, bias=False)
    (shares,) = graph.op(
        "aten.softmax.int", (scores,), graph.shape(scores), attributes={"dim": -1}, saved=(OwnOutput(),)
    )
    few = (B, tokens, chosen)
    best, ids = graph.op(
        "aten.topk.default",
        (shares,),
        few,
        few,
        dtypes=("float32", "int64"),
        attributes={"k": chosen},
        saved=(OwnOutput(1),),
    )
    (total,) = graph.op("aten.sum.dim_IntList", (best,), (B, tokens, 1), attributes={"dim": "[-1]", "keepdim": True})
    (weights,) = graph.op("aten.div.Tensor", (best, total), few, saved=(total, best))
    turned = transpose(graph, ids, 1, 2)
    column = look(graph, "unsqueeze.default", turned, (B, chosen, tokens, 1), dim=-1)
    (numbers,) = graph.op("aten.arange.default", (), (count,), dtypes=("int64",), attributes={"end": count})
    each = (B, chosen, tokens, count)
    (taken,) = graph.op("aten.eq.Tensor", (column, numbers), each, dtypes=("bool",))
    (ones,) = graph.op("aten.to.dtype", (taken,), each, dtypes=("int64",), attributes={"dtype": "int64"})
    rows = chosen * tokens
    (queue,) = graph.op("aten.flatten.using_ints", (ones,), (B, rows, count), attributes={"start_dim": 1, "end_dim": 2})
    (places,) = graph.op("aten.cumsum.default", (queue,), (B, rows, count), attributes={"dim": 1})
    own = multiply(graph, scale(graph, "sub", places, 1), queue)
    (number,) = graph.op("aten.sum.dim_IntList", (own,), (B, rows), attributes={"dim": "[-1]"})
    apart = look(graph, "unflatten.int", number, (B, chosen, tokens), dim=1, sizes=f"[{chosen}, {tokens}]")
    numbered = transpose(graph, apart, 1, 2)
    (fits,) = graph.op("aten.lt.Scalar", (numbered,), few, dtypes=("bool",), attributes={"other": room})
    target = add(graph, scale(graph, "mul", ids, room), numbered)
    (kept,) = graph.op(
        "aten.where.ScalarOther", (fits, target), few, dtypes=("int64",), attributes={"other": count * room}
    )
    (floats,) = graph.op("aten.type_as.default", (queue, value), (B, rows, count), dtypes=("float32",), detached=True)
    (share,) = graph.op("aten.mean.dim", (floats,), (B, count), attributes={"dim": "[1]"})
    (probability,) = graph.op("aten.mean.dim", (shares,), (B, count), attributes={"dim": "[1]"})
    both = multiply(graph, share, probability)
    (summed,) = graph.op("aten.sum.dim_IntList", (both,), (B,), attributes={"dim": "[-1]"})
    balance = scale(graph, "mul", summed, count)
    return kept, multiply(graph, weights, fits), balance


def _compute(graph: GraphBuilder, experts: ExpertLayers, value: int, places: int, weights: int, room: int) -> int:
    batch, tokens, width = graph.shape(value)
    count, chosen = experts.num_experts, experts.top_k
    rows, held = times(tokens, chosen), count * room
    (flat,) = graph.op("aten.flatten.using_ints", (places,), (batch, rows), attributes={"start_dim": 1})
    (copies,) = graph.op(
        "aten.repeat_interleave.self_int", (value,), (batch, rows, width), attributes={"repeats": chosen, "dim": 1}
    )
    (empty,) = graph.op(
        "aten.new_zeros.default",
        (value,),
        (batch, held + 1, width),
        attributes={"size": f"[b, {held + 1}, {width}]"},
        detached=True,
    )
    index = _spread(graph, flat, width.fixed)
    (filled,) = graph.op(
        "aten.scatter.src",
        (empty, index, copies),
        (batch, held + 1, width),
        attributes={"dim": 1},
        saved=(index,),
    )
    whole = look(graph, "slice.Tensor", filled, (batch, held + 1, width), start=0, end=2**63 - 1)
    cut = look(graph, "slice.Tensor", whole, (batch, held, width), dim=1, start=0, end=held)
    apart = look(graph, "unflatten.int", cut, (batch, count, room, width), dim=1, sizes=f"[{count}, {room}]")
    grouped = _join(graph, transpose(graph, apart, 0, 1), (count, times(batch, room), width))
    hidden = _inner(graph, experts, grouped, width.fixed)
    down = graph.parameter("down", count, experts.ffn, width)
    done = batched_product(graph, hidden, down)
    parted = look(graph, "unflatten.int", done, (count, batch, room, width), dim=1, sizes=f"[-1, {room}]")
    back = _join(graph, transpose(graph, parted, 0, 1), (batch, held, width))
    (bounded,) = graph.op("aten.clamp.default", (flat,), (batch, rows), attributes={"max": held - 1})
    index = _spread(graph, bounded, width.fixed)
    (found,) = graph.op(
        "aten.gather.default", (back, index), (batch, rows, width), attributes={"dim": 1}, saved=(index, back)
    )
    each = look(graph, "unflatten.int", found, (batch, tokens, chosen, width), dim=1, sizes=f"[{tokens}, -1]")
    factor = look(graph, "unsqueeze.default", weights, (batch, tokens, chosen, 1), dim=-1)
    (out,) = graph.op(
        "aten.sum.dim_IntList", (multiply(graph, each, factor),), (batch, tokens, width), attributes={"dim": "[2]"}
    )
    return out


def _inner(graph: GraphBuilder, experts: ExpertLayers, grouped: int, width: int) -> int:
    """What the experts compute between their first and their last product."""
    count, ffn = experts.num_experts, experts.ffn
    gate = activation(graph, "silu", batched_product(graph, grouped, graph.parameter("gate", count, width, ffn)))
    return multiply(graph, gate, batched_product(graph, grouped, graph.parameter("up", count, width, ffn)))


def _spread(graph: GraphBuilder, rows: int, width: int) -> int:
    """An index of rows (batch, rows) for all columns."""
    batch, count = graph.shape(rows)
    column = look(graph, "unsqueeze.default", rows, (batch, count, 1), dim=-1)
    return look(graph, "expand.default", column, (batch, count, width), size=f"[-1, -1, {width}]")


def _join(graph: GraphBuilder, value: int, shape: Shape) -> int:
    """A copy with its dims 1 and 2 joined."""
    (out,) = graph.op("aten.flatten.using_ints", (value,), shape, attributes={"start_dim": 1, "end_dim": 2})
    return out
