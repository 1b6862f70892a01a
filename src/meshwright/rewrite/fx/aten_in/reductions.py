"""Converters of reductions, normalisations and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.fx.aten_in.declaration import CONVERTERS, Converter, Found, as_tuple, converts

if TYPE_CHECKING:
    from meshwright.rewrite.fx.reading import Reader


def _reduction(operator: str) -> Converter:
    def convert(r: Reader, a: dict[str, Any]) -> Found:
        x, dims = a["self"], a.get("dim")
        if not r.is_float(x) or a.get("dtype") is not None:
            return None
        rank = len(r.shape(x))
        chosen = list(range(rank) if dims is None or dims == [] else (dims if isinstance(dims, Sequence) else [dims]))
        # Reducing one dim after another, a sum of low precision may overflow, and equal maxima divide their gradient
        # differently.
        if len(chosen) > 1 and (r.dtype(x) in ("float16", "bfloat16") or (r.training and operator in ("amax", "amin"))):
            return None
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


@converts("var.dim", "var.correction")
def _variance(r: Reader, a: dict[str, Any]) -> Found:
    x, dims = a["self"], as_tuple(a.get("dim") or (), 1)
    correction = a.get("correction", 1) if "unbiased" not in a else int(a["unbiased"])
    if not r.is_float(x) or correction != 0 or len(dims) != 1:
        return None
    return r.terms.apply("variance", x, axis=dims[0] % len(r.shape(x)), keep=bool(a.get("keepdim", False)))


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
    if a.get("ceil_mode") or as_tuple(a.get("dilation", 1), 2) != (1, 1):
        return None
    return _pool(r, a, "max_pool2d")


@converts("avg_pool2d.default")
def _avg_pool(r: Reader, a: dict[str, Any]) -> Found:
    uncounted = not a.get("count_include_pad", True) and as_tuple(a.get("padding", 0), 2) != (0, 0)
    if a.get("ceil_mode") or uncounted or a.get("divisor_override") is not None:
        return None
    return _pool(r, a, "avg_pool2d")


def _pool(r: Reader, a: dict[str, Any], operator: str) -> Found:
    if len(r.shape(a["self"])) != 4:
        return None
    kernel = as_tuple(a["kernel_size"], 2)
    stride = as_tuple(a["stride"], 2) if a.get("stride") else kernel
    return r.terms.apply(operator, a["self"], kernel=kernel, stride=stride, padding=as_tuple(a.get("padding", 0), 2))


@converts("adaptive_avg_pool2d.default")
def _adaptive(r: Reader, a: dict[str, Any]) -> Found:
    x, size = a["self"], as_tuple(a["output_size"], 2)
    if len(r.shape(x)) != 4:
        return None
    if size == r.shape(x)[2:]:
        return x
    if size != (1, 1):
        return None
    return r.terms.apply("mean", r.terms.apply("mean", x, axis=3, keep=True), axis=2, keep=True)
