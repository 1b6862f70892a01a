"""Rotary positions, as `zoo.llama` computes them."""

from __future__ import annotations

from meshwright.templates.builder import GraphBuilder
from meshwright.templates.modules import add, chunk, join, multiply

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
