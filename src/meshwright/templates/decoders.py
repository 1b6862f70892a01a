"""Graphs of decoders from their sizes (`decoder_graph`): models like GPT and Llama, and mixtures of experts of both.

A shape with ``root_norm`` gives blocks like Llama's, any other shape blocks like GPT's:

Llama     RMS norms, rotary positions, grouped queries (or latent attention), SwiGLU, as `zoo.llama`
GPT       layer norms, learned positions, one product for Q, K and V, GELU, as `zoo.gpt`
experts   routed with a fixed capacity, as `zoo.mixtral` (`mix_experts`)

Functions take and return values of a `GraphBuilder` by their numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.spec import Graph
from meshwright.templates.graph_builder import B, GraphBuilder, OwnOutput, Shape, times
from meshwright.templates.modules import (
    activation,
    add,
    attention,
    attention_by_products,
    batched_product,
    chunk,
    dropout,
    embedding,
    join,
    layer_norm,
    linear,
    look,
    multiply,
    rms_norm,
    scale,
    split,
    split_heads,
    token_cross_entropy,
    transpose,
)

if TYPE_CHECKING:
    from meshwright.templates.shapes import ExpertLayers, LatentAttention, TransformerShape


# router_aux_loss_coef of Mixtral's configuration.
_BALANCE = 0.02


def start_balance(graph: GraphBuilder, value: int) -> int:
    """Add the initial balance loss of the routers, zeros of shape (batch,); return its number."""
    (out,) = graph.op("aten.new_zeros.default", (value,), (B,), attributes={"size": "[b]"}, detached=True)
    return out


# Experts have a fixed capacity and are computed together, as batched products, as in `zoo.mixtral`.
def mix_experts(graph: GraphBuilder, experts: ExpertLayers, value: int, capacity_factor: float) -> tuple[int, int]:
    """Add a layer of experts that reads ``value`` (batch, tokens, width).

    Return its output, of the same shape, and its balance loss, of shape (batch,). An expert takes at most
    ``capacity_factor`` · top_k · tokens / experts tokens of a sequence; further tokens are dropped.
    """
    tokens, count, chosen = graph.shape(value)[1].fixed, experts.num_experts, experts.top_k
    room = min(tokens, math.ceil(capacity_factor * chosen * tokens / count))
    with graph.within("router"):
        places, weights, balance = _route(graph, experts, value, room)
    with graph.within("experts"):
        return _compute(graph, experts, value, places, weights, room), balance


def balanced_loss(graph: GraphBuilder, logits: int, targets: int, balance: int, layers: int) -> int:
    """Add the loss: the cross-entropy of the tokens plus 0.02 times the mean balance loss of the layers."""
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


# What drops out of GPT-2's and BERT's blocks (Radford et al., 2019; Devlin et al., 2019).
_DROPOUT = 0.1


@lru_cache(maxsize=64)
def decoder_graph(
    shape: TransformerShape,
    seq: int,
    *,
    capacity_factor: float = 1.0,
    fused_attention: bool = True,
    name: str = "decoder",
) -> Graph:
    """Return the graph of a decoder for training on sequences of ``seq`` tokens.

    ``capacity_factor``: tokens that all experts can take, over the tokens routed to them (`zoo.mixtral`).
    ``fused_attention``: attention is one op; if False, GPT-like models compute it by products and a softmax, and keep
    the scores. The batch size of the graph is symbolic.
    """
    graph = GraphBuilder()
    tokens, targets = graph.input("tokens_BT", B, seq), graph.input("target", B, seq)
    writer = _Rotary(graph, shape, seq) if shape.root_norm else _Learned(graph, shape, seq, fused_attention)
    graph.layer("embedding")
    value, table = writer.embed(tokens)
    balance = None
    for index in range(shape.layers):
        # Capture counts what prepares the balance loss to the first block.
        graph.layer(f"blocks.{index}")
        if shape.experts and balance is None:
            balance = start_balance(graph, value)
        with graph.within(f"blocks.{index}"):
            value = add(graph, value, writer.attend(value))
            normed = writer.norm("mlp_norm", value)
            if shape.is_dense(index):
                value = add(graph, value, writer.feed_forward(normed))
                continue
            assert shape.experts is not None
            assert balance is not None
            mixed, own_balance = mix_experts(graph, shape.experts, normed, capacity_factor)
            if shape.experts.num_shared:
                shared = gated_mlp(graph, "shared", normed, shape.experts.num_shared * shape.experts.ffn)
                mixed = add(graph, mixed, shared)
            value, balance = add(graph, value, mixed), add(graph, balance, own_balance)
    graph.layer("head")
    normed = writer.norm("norm", value)
    logits = linear(graph, "head", normed, shape.vocab, bias=False, weight=table if shape.tied else None)
    if balance is None:
        with graph.within("loss"):
            loss = token_cross_entropy(graph, logits, targets)
    else:
        loss = balanced_loss(graph, logits, targets, balance, shape.layers)
    return graph.finish(name, loss)


class _Learned:
    """Blocks of GPT."""

    def __init__(self, graph: GraphBuilder, shape: TransformerShape, seq: int, fused_attention: bool) -> None:
        self._graph, self._shape, self._seq, self._fused_attention = graph, shape, seq, fused_attention
        self._dropout = _DROPOUT if shape.dropout else 0.0

    def embed(self, tokens: int) -> tuple[int, int]:
        graph, shape = self._graph, self._shape
        (places,) = graph.op("aten.arange.default", (), (self._seq,), dtypes=("int64",), attributes={"end": self._seq})
        words, table = embedding(graph, "embedding", shape.vocab, shape.hidden, tokens)
        positions, _ = embedding(graph, "position", shape.max_positions, shape.hidden, places)
        return dropout(graph, "dropout", add(graph, words, positions), self._dropout), table

    def norm(self, name: str, value: int) -> int:
        return layer_norm(self._graph, name, value, bias=self._shape.biased)

    def attend(self, value: int) -> int:
        graph, shape = self._graph, self._shape
        normed = self.norm("attention_norm", value)
        with graph.within("attention"):
            packed = linear(graph, "query_key_value", normed, 3 * shape.hidden, bias=shape.biased)
            query, key, content = (
                split_heads(graph, part, shape.heads, f"[{shape.heads}, -1]") for part in chunk(graph, packed, 3)
            )
            if self._fused_attention:
                mixed = attention(graph, query, key, content, causal=True, dropout=self._dropout)
            else:
                mixed = attention_by_products(graph, query, key, content, dropout_share=self._dropout)
            out = linear(graph, "projection", mixed, shape.hidden, bias=shape.biased)
            return dropout(graph, "output_dropout", out, self._dropout)

    def feed_forward(self, normed: int) -> int:
        graph, shape = self._graph, self._shape
        with graph.within("mlp"):
            wide = linear(graph, "widen", normed, shape.ffn, bias=shape.biased)
            bent = activation(graph, "gelu", wide, approximate="tanh")
            out = linear(graph, "projection", bent, shape.hidden, bias=shape.biased)
            return dropout(graph, "dropout", out, self._dropout)


class _Rotary:
    """Blocks of Llama."""

    def __init__(self, graph: GraphBuilder, shape: TransformerShape, seq: int) -> None:
        self._graph, self._shape, self._seq = graph, shape, seq
        self._tables = (0, 0)

    def embed(self, tokens: int) -> tuple[int, int]:
        graph, shape = self._graph, self._shape
        width = shape.head_dim if shape.latent is None else shape.latent.rotary_dim
        self._tables = rotary_tables(graph, self._seq, width)
        return embedding(graph, "embedding", shape.vocab, shape.hidden, tokens)

    def norm(self, name: str, value: int) -> int:
        return rms_norm(self._graph, name, value)

    def attend(self, value: int) -> int:
        graph, shape = self._graph, self._shape
        normed = self.norm("attention_norm", value)
        with graph.within("attention"):
            query, key, content = self._grouped(normed) if shape.latent is None else self._latent(normed, shape.latent)
            mixed = attention(graph, query, key, content, causal=True, grouped=shape.latent is None)
            return linear(graph, "projection", mixed, shape.hidden, bias=False)

    def feed_forward(self, normed: int) -> int:
        return gated_mlp(self._graph, "mlp", normed, self._shape.ffn)

    def _grouped(self, normed: int) -> tuple[int, int, int]:
        graph, shape = self._graph, self._shape
        query, key, content = (
            self._heads(linear(graph, part, normed, heads * shape.head_dim, bias=False), heads)
            for part, heads in (("query", shape.heads), ("key", shape.kv_heads), ("value", shape.kv_heads))
        )
        query, key = (rotate(graph, part, self._tables) for part in (query, key))
        return query, key, content

    def _latent(self, normed: int, latent: LatentAttention) -> tuple[int, int, int]:
        graph, heads = self._graph, self._shape.heads
        low = rms_norm(graph, "query_norm", linear(graph, "query_down", normed, latent.query_rank, bias=False))
        width = latent.content_dim + latent.rotary_dim
        query = self._heads(linear(graph, "query_up", low, heads * width, bias=False), heads)
        plain, turned = split(graph, query, latent.content_dim, latent.rotary_dim)
        both = linear(graph, "key_value_down", normed, latent.kv_rank + latent.rotary_dim, bias=False)
        low, shared = split(graph, both, latent.kv_rank, latent.rotary_dim)
        width = latent.content_dim + latent.value_dim
        high = linear(graph, "key_value_up", rms_norm(graph, "key_value_norm", low), heads * width, bias=False)
        key, content = split(graph, self._heads(high, heads), latent.content_dim, latent.value_dim)
        batch, tokens, _ = graph.shape(shared)
        shared = look(graph, "unsqueeze.default", shared, (batch, 1, tokens, latent.rotary_dim), dim=1)
        shared = look(
            graph,
            "expand.default",
            rotate(graph, shared, self._tables),
            (batch, heads, tokens, latent.rotary_dim),
            size=f"[-1, {heads}, -1, -1]",
        )
        query = join(graph, plain, rotate(graph, turned, self._tables))
        return query, join(graph, key, shared), content

    def _heads(self, value: int, heads: int) -> int:
        return split_heads(self._graph, value, heads, f"[-1, {self._graph.width(value) // heads}]")


def gated_mlp(graph: GraphBuilder, name: str, normed: int, width: int) -> int:
    """Add a SwiGLU feed-forward with inner size ``width``; return its output."""
    with graph.within(name):
        gate = activation(graph, "silu", linear(graph, "gate", normed, width, bias=False))
        up = linear(graph, "up", normed, width, bias=False)
        return linear(graph, "down", multiply(graph, gate, up), graph.width(normed), bias=False)


# Llama's first base; no cost depends on it.
_BASE = "10000.0"


def rotary_tables(graph: GraphBuilder, seq: int, head_dim: int) -> tuple[int, int]:
    """Add the tables of rotary positions; return cosines and sines, each of shape (tokens, head_dim / 2).

    Every stage computes them for itself.
    """
    half = head_dim // 2
    single = ("float32",)
    (steps,) = graph.op(
        "aten.arange.start_step",
        (),
        (half,),
        dtypes=single,
        attributes={"start": 0, "end": head_dim, "step": 2, "dtype": "float32"},
    )
    (exponents,) = graph.op("aten.div.Tensor", (steps,), (half,), attributes={"other": head_dim})
    (places,) = graph.op("aten.arange.default", (), (seq,), dtypes=single, attributes={"end": seq, "dtype": "float32"})
    (negative,) = graph.op("aten.neg.default", (exponents,), (half,))
    (rates,) = graph.op("aten.pow.Scalar", (negative,), (half,), attributes={"self": _BASE})
    (angles,) = graph.op("aten.outer.default", (places, rates), (seq, half))
    (cosines,) = graph.op("aten.cos.default", (angles,), (seq, half))
    (sines,) = graph.op("aten.sin.default", (angles,), (seq, half))
    return cosines, sines


def rotate(graph: GraphBuilder, value: int, tables: tuple[int, int]) -> int:
    """Apply rotary positions to ``value`` (batch, heads, tokens, width); ``tables`` are from `rotary_tables`."""
    cosines, sines = tables
    first, second = chunk(graph, value, 2)
    left, right = multiply(graph, first, cosines), multiply(graph, second, sines)
    (turned,) = graph.op("aten.sub.Tensor", (left, right), graph.shape(left))
    other = add(graph, multiply(graph, second, cosines), multiply(graph, first, sines))
    (out,) = graph.op("aten.type_as.default", (join(graph, turned, other), value), graph.shape(value), view=True)
    return out
