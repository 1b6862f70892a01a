"""Converters of linear layers, matrix products, convolutions, attention and embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from meshwright.rewrite.fx.aten_in.declaration import CONVERTERS, Converter, Found, as_tuple, converts

if TYPE_CHECKING:
    from meshwright.rewrite.fx.reading import Reader


@converts("linear.default")
def _linear(r: Reader, a: dict[str, Any]) -> Found:
    return r.terms.apply("linear", a["input"], a["weight"], *r.given(a.get("bias")))


@converts("matmul.default", "mm.default", "bmm.default")
def _matmul(r: Reader, a: dict[str, Any]) -> Found:
    x, y = a["self"], a.get("other", a.get("mat2"))
    assert y is not None
    one, two = r.shape(x), r.shape(y)
    if len(one) < 2 or len(two) < 2 or not r.is_float(x):
        return None
    if len(two) > 2:
        lead = torch.broadcast_shapes(one[:-2], two[:-2])
        x, y = r.broadcast(x, (*lead, *one[-2:])), r.broadcast(y, (*lead, *two[-2:]))
    return r.terms.apply("matmul", x, y)


@converts("addmm.default")
def _addmm(r: Reader, a: dict[str, Any]) -> Found:
    if a.get("beta", 1) != 1 or a.get("alpha", 1) != 1:
        return None
    made = r.terms.apply("matmul", a["mat1"], a["mat2"])
    return r.terms.apply("add", r.broadcast(a["self"], r.shape(made)), made)


def _convolution(dims: int) -> Converter:
    def convert(r: Reader, a: dict[str, Any]) -> Found:
        if len(r.shape(a["input"])) != dims + 2 or isinstance(a.get("padding"), str):
            return None
        attributes = {
            name: as_tuple(a.get(name, usual), dims) for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))
        }
        operands = (a["input"], a["weight"], *r.given(a.get("bias")))
        return r.terms.apply(f"conv{dims}d", *operands, groups=a.get("groups", 1), **attributes)

    return convert


CONVERTERS["aten.conv1d.default"] = _convolution(1)
CONVERTERS["aten.conv2d.default"] = _convolution(2)


@converts("scaled_dot_product_attention.default")
def _attention(r: Reader, a: dict[str, Any]) -> Found:
    mask = a.get("attn_mask")
    if a.get("dropout_p", 0.0) or a.get("enable_gqa") or (mask is not None and not r.is_float(mask)):
        return None
    q = a["query"]
    scale = a.get("scale")
    if mask is not None:
        mask = r.broadcast(mask, (*r.shape(q)[:-1], r.shape(a["key"])[-2]))
    return r.terms.apply(
        "attention",
        q,
        a["key"],
        a["value"],
        *r.given(mask),
        scale=1 / math.sqrt(r.shape(q)[-1]) if scale is None else scale,
        causal=bool(a.get("is_causal", False)),
    )


@converts("embedding.default")
def _embedding(r: Reader, a: dict[str, Any]) -> Found:
    # The row of a padding index has no gradient.
    padded = r.training and a.get("padding_idx", -1) != -1
    return (
        None
        if a.get("sparse") or a.get("scale_grad_by_freq") or padded
        else r.terms.apply("embedding", a["weight"], a["indices"])
    )
