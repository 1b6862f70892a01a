"""Matrix products, linear layers, convolutions and attention: sums of products over a common index."""

from __future__ import annotations

from typing import Any

from meshwright.rewrite.calculus import Arithmetic, IllTypedError, Indexed
from meshwright.rewrite.operators.elementwise import each, operator


@operator
def matmul(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    """Return the matrix product. x: (..., m, k); y: (k, n), or (..., k, n) with the leading sizes of x."""
    if x.rank < 2 or y.rank not in (2, x.rank):
        raise IllTypedError(f"a matrix product cannot take tensors of {x.rank} and {y.rank} dims")
    a.same(x.shape[-1], y.shape[-2], "inner sizes of a product")
    lead = y.rank - 2
    for one, two in zip(x.shape[:lead], y.shape[:lead], strict=True):
        a.same(one, two, "leading sizes of a product")
    return Indexed(
        (*x.shape[:-1], y.shape[-1]),
        lambda *i: a.total(x.shape[-1], lambda k: x[(*i[:-1], k)] * y[(*i[:lead], k, i[-1])]),
    )


@operator
def linear(a: Arithmetic, x: Indexed, weight: Indexed, bias: Indexed | None = None) -> Indexed:
    """Return ``x @ weight.T + bias``. x: (..., k); weight: (n, k); bias: (n,)."""
    if x.rank < 1 or weight.rank != 2:
        raise IllTypedError(f"a linear layer cannot take an input of {x.rank} dims and a weight of {weight.rank} dims")
    a.same(x.shape[-1], weight.shape[1], "inner sizes of a linear layer")

    def at(*i: Any) -> Any:
        value = a.total(x.shape[-1], lambda k: x[(*i[:-1], k)] * weight[(i[-1], k)])
        return value if bias is None else value + bias[(i[-1],)]

    return _with_bias(a, Indexed((*x.shape[:-1], weight.shape[0]), at), bias, weight.shape[0])


@operator
def conv1d(
    a: Arithmetic,
    x: Indexed,
    weight: Indexed,
    bias: Indexed | None = None,
    *,
    stride: tuple[Any, ...],
    padding: tuple[Any, ...],
    dilation: tuple[Any, ...],
    groups: Any,
) -> Indexed:
    """Return torch's conv1d. x: (n, c, w); weight: (o, c / groups, k); bias: (o,)."""
    return convolve(a, x, weight, bias, stride, padding, dilation, groups, 1)


@operator
def conv2d(
    a: Arithmetic,
    x: Indexed,
    weight: Indexed,
    bias: Indexed | None = None,
    *,
    stride: tuple[Any, ...],
    padding: tuple[Any, ...],
    dilation: tuple[Any, ...],
    groups: Any,
) -> Indexed:
    """Return torch's conv2d. x: (n, c, h, w); weight: (o, c / groups, kh, kw); bias: (o,)."""
    return convolve(a, x, weight, bias, stride, padding, dilation, groups, 2)


@operator
def attention(
    a: Arithmetic, q: Indexed, k: Indexed, v: Indexed, mask: Indexed | None = None, *, scale: Any, causal: bool
) -> Indexed:
    """Return scaled dot-product attention of q, k and v, each (..., tokens, features).

    ``scale`` multiplies the scores. ``mask`` is added to them. ``causal``: token i attends to tokens 0 to i.
    """
    if not q.rank == k.rank == v.rank >= 2:
        raise IllTypedError(f"attention cannot take tensors of {q.rank}, {k.rank} and {v.rank} dims")
    keys = Indexed((*k.shape[:-2], k.shape[-1], k.shape[-2]), lambda *i: k[(*i[:-2], i[-1], i[-2])])
    scores = each(a, lambda one: one * a.number(scale), matmul(a, q, keys))
    if mask is not None:
        scores = each(a, lambda one, two: one + two, scores, mask)

    def weight(*i: Any) -> Any:
        raised = a.apply("exp", scores[i])
        return a.choose(a.within(i[-1], 0, i[-2] + 1), raised, a.number(0)) if causal else raised

    weights = Indexed(scores.shape, weight)
    mixed: Indexed = matmul(a, weights, v)

    def at(*i: Any) -> Any:
        total = a.total(scores.shape[-1], lambda token: weight(*i[:-1], token))
        return mixed[i] * a.apply("reciprocal", total)

    return Indexed(mixed.shape, at)


def convolve(
    a: Arithmetic,
    x: Indexed,
    weight: Indexed,
    bias: Indexed | None,
    stride: tuple[Any, ...],
    padding: tuple[Any, ...],
    dilation: tuple[Any, ...],
    groups: Any,
    dims: int,
) -> Indexed:
    """Return a convolution over ``dims`` spatial dims; ``stride``, ``padding`` and ``dilation`` have one entry per dim.

    x: (n, c, spatial...); weight: (o, c / groups, kernel...); bias: (o,) or None.
    """
    _check_ranks(x, weight, dims)
    a.same(x.shape[1], weight.shape[1] * groups, "channels of a convolution")
    per_group = a.quotient(weight.shape[0], groups, "output channels of a convolution by groups")
    axes = range(dims)
    sizes = tuple(
        a.floored(x.shape[2 + d] + 2 * padding[d] - (weight.shape[2 + d] - 1) * dilation[d] - 1, stride[d]) + 1
        for d in axes
    )

    def at(n: Any, o: Any, *place: Any) -> Any:
        group = 0 if _is_one(groups) else a.divided(o, per_group)[0]

        def over_kernel(channel: Any, taps: tuple[Any, ...]) -> Any:
            if len(taps) < dims:
                return a.total(weight.shape[2 + len(taps)], lambda tap: over_kernel(channel, (*taps, tap)))
            read = tuple(place[d] * stride[d] + taps[d] * dilation[d] - padding[d] for d in axes)
            inside = a.both(*(a.within(read[d], 0, x.shape[2 + d]) for d in axes))
            value = a.choose(inside, x[(n, group * weight.shape[1] + channel, *read)], a.number(0))
            return value * weight[(o, channel, *taps)]

        value = a.total(weight.shape[1], lambda channel: over_kernel(channel, ()))
        return value if bias is None else value + bias[(o,)]

    return _with_bias(a, Indexed((x.shape[0], weight.shape[0], *sizes), at), bias, weight.shape[0])


def _check_ranks(x: Indexed, weight: Indexed, dims: int) -> None:
    if x.rank != dims + 2 or weight.rank != dims + 2:
        raise IllTypedError(
            f"a convolution over {dims} dims cannot take an input of {x.rank} dims and a weight of {weight.rank} dims"
        )


def _with_bias(a: Arithmetic, result: Indexed, bias: Indexed | None, size: Any) -> Indexed:
    if bias is not None:
        a.same(bias.rank, 1, "dims of a bias")
        a.same(bias.shape[0], size, "size of a bias")
    return result


def _is_one(number: Any) -> bool:
    return bool(number == 1)
