"""Decoders from their sizes: GPT and its relatives, Llama and its relatives, mixtures of experts of both.

rotary (a shape with root mean square norms)   RMS norms, rotary positions, grouped queries, as `zoo.llama`
else                                           layer norms, learned positions, one product for Q, K, V, as `zoo.gpt`
gated feed-forward                             SwiGLU; else GELU
experts                                        routed with a fixed capacity, as `zoo.mixtral`
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.spec import Graph
from meshwright.templates.builder import B, GraphBuilder
from meshwright.templates.experts import balanced_loss, mix_experts, start_balance
from meshwright.templates.modules import (
    activation,
    add,
    attention,
    attention_by_products,
    chunk,
    dropout,
    embedding,
    join,
    layer_norm,
    linear,
    look,
    multiply,
    rms_norm,
    split,
    split_heads,
    token_cross_entropy,
)

if TYPE_CHECKING:
    from meshwright.templates.shapes import LatentAttention, TransformerShape

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
    """The graph of a decoder for training on sequences of ``seq`` tokens.

    ``capacity_factor``: places of all experts over the choices of all tokens (`zoo.mixtral`). ``fused_attention``:
    attention is one op; if not, learned positions have products and a softmax, whose scores are kept.
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
    """SwiGLU: one half gates the other."""
    with graph.within(name):
        gate = activation(graph, "silu", linear(graph, "gate", normed, width, bias=False))
        up = linear(graph, "up", normed, width, bias=False)
        return linear(graph, "down", multiply(graph, gate, up), graph.width(normed), bias=False)


# Llama's first base; no cost depends on it.
_BASE = "10000.0"


def rotary_tables(graph: GraphBuilder, seq: int, head_dim: int) -> tuple[int, int]:
    """Cosines and sines of (tokens, half a head), which every stage computes for itself."""
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
    """Turn each pair of (batch, heads, tokens, width) by its token's angle."""
    cosines, sines = tables
    first, second = chunk(graph, value, 2)
    left, right = multiply(graph, first, cosines), multiply(graph, second, sines)
    (turned,) = graph.op("aten.sub.Tensor", (left, right), graph.shape(left))
    other = add(graph, multiply(graph, second, cosines), multiply(graph, first, sines))
    (out,) = graph.op("aten.type_as.default", (join(graph, turned, other), value), graph.shape(value), view=True)
    return out
