"""Converters of elementwise operators and casts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from meshwright.rewrite.fx.aten_in.declaration import CONVERTERS, IN_PLACE, Converter, Found, converts

if TYPE_CHECKING:
    from meshwright.rewrite.fx.reading import Reader


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
        if r.training and operator in ("maximum", "minimum"):
            # At equal operands, each gets half of the gradient, but relu gets none.
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
    usual = {"aten.clamp.default": (None, None), "aten.hardtanh.default": (-1.0, 1.0), "aten.relu6.default": (0.0, 6.0)}
    name = IN_PLACE.get(r.name, r.name)
    low, high = usual[name]
    low, high = a.get("min", a.get("min_val", low)), a.get("max", a.get("max_val", high))
    # At the bounds themselves, the gradient of clamp is 1 and those of the others are 0.
    if not r.is_float(a["self"]) or low is None or high is None or (r.training and "clamp" not in name):
        return None
    return r.terms.apply("clamp", a["self"], low=float(low), high=float(high)) if low <= high else None


@converts("where.self")
def _where(r: Reader, a: dict[str, Any]) -> Found:
    shape = torch.broadcast_shapes(*(r.shape(a[name]) for name in ("condition", "self", "other")))
    condition, one, two = (r.broadcast(a[name], shape) for name in ("condition", "self", "other"))
    return r.terms.apply("where", condition, one, two) if r.dtype(one) == r.dtype(two) and r.is_float(one) else None


@converts("masked_fill.Scalar")
def _masked_fill(r: Reader, a: dict[str, Any]) -> Found:
    shape = r.shape(a["self"])
    filling = r.full(r.terms.types[a["self"]], float(a["value"]))
    if filling is None or torch.broadcast_shapes(r.shape(a["mask"]), shape) != shape:
        return None
    return r.terms.apply("where", r.broadcast(a["mask"], shape), filling, a["self"])


@converts("to.dtype", "_to_copy.default", "type_as.default")
def _to(r: Reader, a: dict[str, Any]) -> Found:
    dtype = r.dtype(a["other"]) if "other" in a else str(a["dtype"]).removeprefix("torch.")
    placed = any(a.get(name) is not None for name in ("layout", "device", "memory_format"))
    if placed:
        return None
    return a["self"] if dtype == r.dtype(a["self"]) else r.terms.apply("cast", a["self"], dtype=dtype)


@converts("view.dtype")
def _bitcast(r: Reader, a: dict[str, Any]) -> Found:
    x, dtype = a["self"], str(a["dtype"]).removeprefix("torch.")
    if r.training:
        # No gradient goes through whole numbers.
        return None
    # A view of a view is a view of the memory itself.
    while r.terms.nodes[x].operator == "bitcast":
        (x,) = r.terms.nodes[x].operands
    return x if r.dtype(x) == dtype else r.terms.apply("bitcast", x, dtype=dtype)
