"""ATen operators as declared ones: by operator, what it is in terms, for arguments that have such a meaning.

A converter gets a `Reader` and the call's arguments by name, and returns one term, or several for several results, or
None where the arguments have no such meaning (an average pool that does not count its padding): then the call stays
opaque. What a converter returns is compared with what torch says of the result; a term of another shape or dtype is
dropped, and the call is opaque, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from meshwright.rewrite.terms import TensorType

if TYPE_CHECKING:
    from meshwright.rewrite.fx.read import Reader

Found: TypeAlias = "int | tuple[int, ...] | None"
Converter: TypeAlias = "Callable[[Reader, dict[str, Any]], Found]"

CONVERTERS: dict[str, Converter] = {}
# Operators that write their result over their first argument compute what the plain one does.
_IN_PLACE_UNARY = (
    *("relu", "silu", "sigmoid", "tanh", "exp", "neg", "abs", "sqrt", "rsqrt", "gelu", "hardtanh", "relu6", "clamp"),
)
_IN_PLACE_BINARY = ("add", "sub", "mul", "div")
IN_PLACE = {
    f"aten.{name}_.{overload}": f"aten.{name}.{overload}"
    for name, overload in (
        *((name, "default") for name in _IN_PLACE_UNARY),
        *((name, overload) for name in _IN_PLACE_BINARY for overload in ("Tensor", "Scalar")),
    )
}


def converts(*names: str) -> Callable[[Converter], Converter]:
    """Declare a converter for ATen operators, by their names with overload."""

    def declare(converter: Converter) -> Converter:
        for name in names:
            CONVERTERS[f"aten.{name}"] = converter
        return converter

    return declare


# --- element by element -------------------------------------------------------------------------

_UNARY = {
    "relu": "relu", "silu": "silu", "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "log": "log", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "reciprocal": "reciprocal", "neg": "neg", "abs": "abs", "erf": "erf", "sin": "sin", "cos": "cos",
    "sign": "sign", "floor": "floor", "ceil": "ceil", "round": "round", "square": "square",
}  # fmt: skip


def _unary(operator: str) -> Converter:
    def convert(r: Reader, a: dict[str, Any]) -> Found:
        return r.terms.apply(operator, a["self"]) if r.is_float(a["self"]) else None

    return convert


for _name, _operator in _UNARY.items():
    CONVERTERS[f"aten.{_name}.default"] = _unary(_operator)


@converts("logical_not.default")
def _logical_not(r: Reader, a: dict[str, Any]) -> Found:
    return r.terms.apply("logical_not", a["self"]) if r.dtype(a["self"]) == "bool" else None


@converts("gelu.default")
def _gelu(r: Reader, a: dict[str, Any]) -> Found:
    name = {"none": "gelu", "tanh": "gelu_tanh"}.get(a.get("approximate", "none"))
    return None if name is None else r.terms.apply(name, a["self"])


def _binary(operator: str) -> Converter:
    def convert(r: Reader, a: dict[str, Any]) -> Found:
        if a.get("alpha", 1) != 1 or a.get("rounding_mode") is not None:
            return None
        pair = r.together(a["self"], a["other"])
        return None if pair is None else r.terms.apply(operator, *pair)

    return convert


for _name in ("add", "sub", "mul", "div"):
    for _overload in ("Tensor", "Scalar"):
        CONVERTERS[f"aten.{_name}.{_overload}"] = _binary(_name)
for _name in ("maximum", "minimum"):
    CONVERTERS[f"aten.{_name}.default"] = _binary(_name)
for _name, _operator in (("gt", "greater"), ("lt", "less"), ("le", "less_equal"), ("eq", "equal")):
    for _overload in ("Tensor", "Scalar"):
        CONVERTERS[f"aten.{_name}.{_overload}"] = _binary(_operator)


@converts("rsub.Scalar")
def _rsub(r: Reader, a: dict[str, Any]) -> Found:
    pair = r.together(a["other"], a["self"])
    return None if pair is None or a.get("alpha", 1) != 1 else r.terms.apply("sub", *pair)


@converts("logical_and.default")
def _logical_and(r: Reader, a: dict[str, Any]) -> Found:
    both = r.dtype(a["self"]) == r.dtype(a["other"]) == "bool" and r.shape(a["self"]) == r.shape(a["other"])
    return r.terms.apply("logical_and", a["self"], a["other"]) if both else None


@converts("pow.Tensor_Scalar")
def _pow(r: Reader, a: dict[str, Any]) -> Found:
    x, power = a["self"], a["exponent"]
    if not r.is_float(x):
        return None
    if power == 2:
        return r.terms.apply("square", x)
    if power in (0.5, -0.5, -1, 1):
        name = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(power)
        return x if name is None else r.terms.apply(name, x)
    if power == 3:
        return r.terms.apply("mul", r.terms.apply("square", x), x)
    return None


@converts("clamp.default", "hardtanh.default", "relu6.default")
def _clamp(r: Reader, a: dict[str, Any]) -> Found:
    low, high = a.get("min", a.get("min_val", 0.0)), a.get("max", a.get("max_val", 6.0))
    if not r.is_float(a["self"]) or low is None or high is None or not low <= high:
        return None
    return r.terms.apply("clamp", a["self"], low=float(low), high=float(high))


@converts("where.self")
def _where(r: Reader, a: dict[str, Any]) -> Found:
    shape = torch.broadcast_shapes(*(r.shape(a[name]) for name in ("condition", "self", "other")))
    condition, one, two = (r.broadcast(a[name], shape) for name in ("condition", "self", "other"))
    return r.terms.apply("where", condition, one, two) if r.dtype(one) == r.dtype(two) and r.is_float(one) else None


@converts("to.dtype", "_to_copy.default", "type_as.default")
def _to(r: Reader, a: dict[str, Any]) -> Found:
    dtype = r.dtype(a["other"]) if "other" in a else str(a["dtype"]).removeprefix("torch.")
    placed = any(a.get(name) is not None for name in ("layout", "device", "memory_format"))
    if placed:
        return None
    return a["self"] if dtype == r.dtype(a["self"]) else r.terms.apply("cast", a["self"], dtype=dtype)


@converts("view.dtype")
def _bitcast(r: Reader, a: dict[str, Any]) -> Found:
    return r.terms.apply("bitcast", a["self"], dtype=str(a["dtype"]).removeprefix("torch."))


# --- products -----------------------------------------------------------------------------------


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
            name: _tuple(a.get(name, usual), dims) for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))
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
    return (
        None
        if a.get("sparse") or a.get("scale_grad_by_freq")
        else r.terms.apply("embedding", a["weight"], a["indices"])
    )


# --- reductions and normalisations --------------------------------------------------------------


def _reduction(operator: str) -> Converter:
    def convert(r: Reader, a: dict[str, Any]) -> Found:
        x, dims = a["self"], a.get("dim")
        if not r.is_float(x) or a.get("dtype") is not None:
            return None
        rank = len(r.shape(x))
        chosen = range(rank) if dims is None or dims == [] else (dims if isinstance(dims, Sequence) else [dims])
        for axis in sorted((dim % rank for dim in chosen), reverse=True):
            x = r.terms.apply(operator, x, axis=axis, keep=bool(a.get("keepdim", False)))
        return x

    return convert


for _name, _operator in (
    ("mean.dim", "mean"),
    ("mean.default", "mean"),
    ("sum.dim_IntList", "sum"),
    ("sum.default", "sum"),
    ("amax.default", "amax"),
    ("amin.default", "amin"),
):
    CONVERTERS[f"aten.{_name}"] = _reduction(_operator)


@converts("softmax.int", "_softmax.default")
def _softmax(r: Reader, a: dict[str, Any]) -> Found:
    return _over_axis(r, a, "softmax")


@converts("log_softmax.int", "_log_softmax.default")
def _log_softmax(r: Reader, a: dict[str, Any]) -> Found:
    return _over_axis(r, a, "log_softmax")


def _over_axis(r: Reader, a: dict[str, Any], operator: str) -> Found:
    if a.get("dtype") is not None or a.get("half_to_float"):
        return None
    return r.terms.apply(operator, a["self"], axis=a["dim"] % len(r.shape(a["self"])))


@converts("layer_norm.default")
def _layer_norm(r: Reader, a: dict[str, Any]) -> Found:
    if len(a["normalized_shape"]) != 1 or (a.get("weight") is None and a.get("bias") is not None):
        return None
    return r.terms.apply("layer_norm", a["input"], *r.given(a.get("weight"), a.get("bias")), eps=a.get("eps", 1e-5))


@converts("rms_norm.default")
def _rms_norm(r: Reader, a: dict[str, Any]) -> Found:
    if len(a["normalized_shape"]) != 1 or a.get("eps") is None:
        return None
    return r.terms.apply("rms_norm", a["input"], *r.given(a.get("weight")), eps=a["eps"])


@converts("group_norm.default")
def _group_norm(r: Reader, a: dict[str, Any]) -> Found:
    if a.get("weight") is None and a.get("bias") is not None:
        return None
    operands = r.given(a.get("weight"), a.get("bias"))
    return r.terms.apply("group_norm", a["input"], *operands, groups=a["num_groups"], eps=a.get("eps", 1e-5))


@converts("batch_norm.default")
def _batch_norm(r: Reader, a: dict[str, Any]) -> Found:
    operands = r.given(a.get("running_mean"), a.get("running_var"), a.get("weight"), a.get("bias"))
    if a.get("training") or len(operands) != 4:
        return None
    return r.terms.apply("batch_norm", a["input"], *operands, eps=a["eps"])


@converts("max_pool2d.default")
def _max_pool(r: Reader, a: dict[str, Any]) -> Found:
    if a.get("ceil_mode") or _tuple(a.get("dilation", 1), 2) != (1, 1):
        return None
    return _pool(r, a, "max_pool2d")


@converts("avg_pool2d.default")
def _avg_pool(r: Reader, a: dict[str, Any]) -> Found:
    uncounted = not a.get("count_include_pad", True) and _tuple(a.get("padding", 0), 2) != (0, 0)
    if a.get("ceil_mode") or uncounted or a.get("divisor_override") is not None:
        return None
    return _pool(r, a, "avg_pool2d")


def _pool(r: Reader, a: dict[str, Any], operator: str) -> Found:
    if len(r.shape(a["self"])) != 4:
        return None
    kernel = _tuple(a["kernel_size"], 2)
    stride = _tuple(a["stride"], 2) if a.get("stride") else kernel
    return r.terms.apply(operator, a["self"], kernel=kernel, stride=stride, padding=_tuple(a.get("padding", 0), 2))


@converts("adaptive_avg_pool2d.default")
def _adaptive(r: Reader, a: dict[str, Any]) -> Found:
    x, size = a["self"], _tuple(a["output_size"], 2)
    if len(r.shape(x)) != 4:
        return None
    if size == r.shape(x)[2:]:
        return x
    if size != (1, 1):
        return None
    return r.terms.apply("mean", r.terms.apply("mean", x, axis=3, keep=True), axis=2, keep=True)


# --- layout -------------------------------------------------------------------------------------


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


@converts("contiguous.default", "clone.default", "alias.default", "detach.default", "lift_fresh_copy.default")
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


def _tuple(value: Any, count: int) -> tuple[int, ...]:
    if isinstance(value, Sequence):
        return tuple(value) * (count if len(value) == 1 else 1)
    return (value,) * count


def expected_type(value: torch.Tensor) -> TensorType:
    """What torch says of a result."""
    return TensorType(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))
