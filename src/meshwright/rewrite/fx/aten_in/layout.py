"""Converters of shapes, slices, concatenations, copies and constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from meshwright.rewrite.fx.aten_in.declaration import Found, converts

if TYPE_CHECKING:
    from meshwright.rewrite.fx.reading import Reader


@converts(
    "view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "unsqueeze.default", "squeeze.dim",
    "squeeze.default", "squeeze.dims", "_unsafe_view.default",
)  # fmt: skip
def _reshape(r: Reader, a: dict[str, Any]) -> Found:
    return r.reshape(a["self"], r.result.shape)


@converts("transpose.int")
def _transpose(r: Reader, a: dict[str, Any]) -> Found:
    rank = len(r.shape(a["self"]))
    order = list(range(rank))
    one, two = a["dim0"] % rank, a["dim1"] % rank
    order[one], order[two] = order[two], order[one]
    return r.terms.apply("transpose", a["self"], order=tuple(order))


@converts("t.default")
def _t(r: Reader, a: dict[str, Any]) -> Found:
    return r.terms.apply("transpose", a["self"], order=(1, 0)) if len(r.shape(a["self"])) == 2 else None


@converts("permute.default")
def _permute(r: Reader, a: dict[str, Any]) -> Found:
    rank = len(r.shape(a["self"]))
    return r.terms.apply("transpose", a["self"], order=tuple(dim % rank for dim in a["dims"]))


@converts("expand.default")
def _expand(r: Reader, a: dict[str, Any]) -> Found:
    return r.broadcast(a["self"], r.result.shape)


@converts("cat.default")
def _cat(r: Reader, a: dict[str, Any]) -> Found:
    first = a["tensors"][0]
    if len({r.dtype(term) for term in a["tensors"]}) > 1 or any(0 in r.shape(term) for term in a["tensors"]):
        return None
    return r.terms.apply("concat", *a["tensors"], axis=a.get("dim", 0) % len(r.shape(first)))


@converts("stack.default")
def _stack(r: Reader, a: dict[str, Any]) -> Found:
    rank = len(r.shape(a["tensors"][0])) + 1
    axis = a.get("dim", 0) % rank
    parts = [r.reshape(term, (*r.shape(term)[:axis], 1, *r.shape(term)[axis:])) for term in a["tensors"]]
    return None if len({r.dtype(term) for term in parts}) > 1 else r.terms.apply("concat", *parts, axis=axis)


@converts(
    "split.Tensor", "split_with_sizes.default", "split.sizes", "chunk.default", "unbind.int", "tensor_split.sections"
)
def _split(r: Reader, a: dict[str, Any]) -> Found:
    x = a["self"]
    axis = a.get("dim", 0) % len(r.shape(x))
    parts, start = [], 0
    unbound = len(r.results[0].shape) < len(r.shape(x))
    for result in r.results:
        stop = start + (1 if unbound else result.shape[axis])
        part = r.cut(x, axis, start, stop)
        parts.append(r.reshape(part, result.shape) if unbound else part)
        start = stop
    return tuple(parts)


@converts("slice.Tensor")
def _slice(r: Reader, a: dict[str, Any]) -> Found:
    x = a["self"]
    axis = a.get("dim", 0) % len(r.shape(x))
    size = r.shape(x)[axis]
    start, stop = a.get("start") or 0, a.get("end")
    stop = size if stop is None else stop
    start, stop = (max(0, min(size, place + size if place < 0 else place)) for place in (start, stop))
    return None if a.get("step", 1) != 1 or stop <= start else r.cut(x, axis, start, stop)


@converts("narrow.default")
def _narrow(r: Reader, a: dict[str, Any]) -> Found:
    axis = a["dim"] % len(r.shape(a["self"]))
    return r.cut(a["self"], axis, a["start"] % r.shape(a["self"])[axis], a["start"] + a["length"])


@converts("select.int")
def _select(r: Reader, a: dict[str, Any]) -> Found:
    axis = a["dim"] % len(r.shape(a["self"]))
    place = a["index"] % r.shape(a["self"])[axis]
    return r.reshape(r.cut(a["self"], axis, place, place + 1), r.result.shape)


@converts("pad.default", "constant_pad_nd.default")
def _pad(r: Reader, a: dict[str, Any]) -> Found:
    pads, rank = list(a["pad"]), len(r.shape(a["self"]))
    if a.get("mode", "constant") != "constant" or a.get("value") not in (None, 0, 0.0) or min(pads) < 0:
        return None
    sides = [(pads[2 * k], pads[2 * k + 1]) for k in range(len(pads) // 2)][::-1]
    sides = [(0, 0)] * (rank - len(sides)) + sides
    low, high = (tuple(side[which] for side in sides) for which in (0, 1))
    return r.terms.apply("pad", a["self"], low=low, high=high)


@converts("flip.default")
def _flip(r: Reader, a: dict[str, Any]) -> Found:
    x = a["self"]
    for dim in a["dims"]:
        x = r.terms.apply("reverse", x, axis=dim % len(r.shape(x)))
    return x


@converts("contiguous.default", "clone.default", "alias.default", "lift_fresh_copy.default")
def _same(r: Reader, a: dict[str, Any]) -> Found:
    return None if a.get("memory_format") not in (None, torch.contiguous_format) else a["self"]


@converts("detach.default")
def _detach(r: Reader, a: dict[str, Any]) -> Found:
    return None if r.training else a["self"]


@converts("dropout.default", "feature_dropout.default", "alpha_dropout.default")
def _dropout(r: Reader, a: dict[str, Any]) -> Found:
    return None if a.get("train", True) and a.get("p", 0.5) else a["input"]


@converts(
    "zeros.default", "ones.default", "full.default", "new_zeros.default", "zeros_like.default", "ones_like.default"
)
def _full(r: Reader, a: dict[str, Any]) -> Found:
    value = a.get("fill_value", 1.0 if r.name.startswith("aten.ones") else 0.0)
    return r.full(r.result, value) if r.result.dtype == "float32" and isinstance(value, int | float) else None
