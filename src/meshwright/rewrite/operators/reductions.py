"""Operators that reduce over a dim or a window: sums, maxima, pooling, normalisation, softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.rewrite.calculus import Arithmetic, IllTypedError, Indexed
from meshwright.rewrite.operators.elementwise import inverse_root, operator
from meshwright.rewrite.operators.layout import check_axis, product_of, replaced

if TYPE_CHECKING:
    from collections.abc import Callable


def _reduced(x: Indexed, axis: int, over: Callable[[Callable[[Any], Any]], Any], keep: bool) -> Indexed:
    check_axis(x, axis)

    def at(*i: Any) -> Any:
        before, after = i[:axis], i[axis + 1 :] if keep else i[axis:]
        return over(lambda k: x[(*before, k, *after)])

    return Indexed((*x.shape[:axis], *((1,) if keep else ()), *x.shape[axis + 1 :]), at)


@operator
def sum_(a: Arithmetic, x: Indexed, *, axis: int, keep: bool) -> Indexed:
    return _reduced(x, axis, lambda body: a.total(x.shape[axis], body), keep)


@operator
def mean(a: Arithmetic, x: Indexed, *, axis: int, keep: bool) -> Indexed:
    check_axis(x, axis)
    return _reduced(x, axis, lambda body: a.total(x.shape[axis], body) * a.inverse_size(x.shape[axis]), keep)


@operator
def variance(a: Arithmetic, x: Indexed, *, axis: int, keep: bool) -> Indexed:
    """Return the mean squared distance from the mean over dim ``axis`` (no Bessel correction)."""
    check_axis(x, axis)
    size, share = x.shape[axis], a.inverse_size(x.shape[axis])

    def spread(body: Callable[[Any], Any]) -> Any:
        centre = a.total(size, body) * share
        return a.total(size, lambda k: (body(k) - centre) * (body(k) - centre)) * share

    return _reduced(x, axis, spread, keep)


@operator
def amax(a: Arithmetic, x: Indexed, *, axis: int, keep: bool) -> Indexed:
    return _reduced(x, axis, lambda body: a.largest(x.shape[axis], body), keep)


@operator
def amin(a: Arithmetic, x: Indexed, *, axis: int, keep: bool) -> Indexed:
    return _reduced(x, axis, lambda body: -a.largest(x.shape[axis], lambda k: -body(k)), keep)


@operator
def softmax(a: Arithmetic, x: Indexed, *, axis: int) -> Indexed:
    """Return exp(x) / Σ exp(x) over dim ``axis``.

    torch subtracts the maximum first, which does not change the exact result.
    """
    check_axis(x, axis)

    def at(*i: Any) -> Any:
        sums = a.total(x.shape[axis], lambda k: a.apply("exp", x[replaced(i, axis, k)]))
        return a.apply("exp", x[i]) * a.apply("reciprocal", sums)

    return Indexed(x.shape, at)


@operator
def log_softmax(a: Arithmetic, x: Indexed, *, axis: int) -> Indexed:
    check_axis(x, axis)

    def at(*i: Any) -> Any:
        return x[i] - a.apply("log", a.total(x.shape[axis], lambda k: a.apply("exp", x[replaced(i, axis, k)])))

    return Indexed(x.shape, at)


@operator
def avg_pool2d(
    a: Arithmetic, x: Indexed, *, kernel: tuple[Any, ...], stride: tuple[Any, ...], padding: tuple[Any, ...]
) -> Indexed:
    """Return the mean of each window; padding counts as zeros, so each sum is divided by the whole kernel's size."""

    def window(body: Callable[..., Any], inside: Callable[..., Any]) -> Any:
        taps = a.total(
            kernel[0],
            lambda row: a.total(kernel[1], lambda col: a.choose(inside(row, col), body(row, col), a.number(0))),
        )
        return taps * a.inverse_size(product_of(kernel))

    return _pooled(a, x, kernel, stride, padding, window)


@operator
def max_pool2d(
    a: Arithmetic, x: Indexed, *, kernel: tuple[Any, ...], stride: tuple[Any, ...], padding: tuple[Any, ...]
) -> Indexed:
    """Return the largest element of each window; padding never counts."""

    def window(body: Callable[..., Any], inside: Callable[..., Any]) -> Any:
        return a.largest(
            kernel[0],
            lambda row: a.largest(kernel[1], lambda col: a.choose(inside(row, col), body(row, col), a.lowest())),
        )

    return _pooled(a, x, kernel, stride, padding, window)


def _pooled(
    a: Arithmetic,
    x: Indexed,
    kernel: tuple[Any, ...],
    stride: tuple[Any, ...],
    padding: tuple[Any, ...],
    window: Callable[..., Any],
) -> Indexed:
    if x.rank != 4:
        raise IllTypedError(f"pooling takes a tensor of 4 dims, {x.rank} were given")
    for before, size in zip(padding, kernel, strict=True):
        # Required by torch; then no window consists of padding only.
        a.ordered(2 * before, size, "twice the padding of a pool, and its kernel")
    height, width = x.shape[2:]
    sizes = (
        a.floored(height + 2 * padding[0] - kernel[0], stride[0]) + 1,
        a.floored(width + 2 * padding[1] - kernel[1], stride[1]) + 1,
    )

    def at(n: Any, c: Any, row: Any, col: Any) -> Any:
        def place(i: Any, j: Any) -> tuple[Any, Any]:
            return row * stride[0] + i - padding[0], col * stride[1] + j - padding[1]

        def inside(i: Any, j: Any) -> Any:
            read = place(i, j)
            return a.both(a.within(read[0], 0, height), a.within(read[1], 0, width))

        return window(lambda i, j: x[(n, c, *place(i, j))], inside)

    return Indexed((*x.shape[:2], *sizes), at)


@operator
def batch_norm(
    a: Arithmetic, x: Indexed, mean: Indexed, variance: Indexed, weight: Indexed, bias: Indexed, *, eps: float
) -> Indexed:
    """Return x normalised per channel (dim 1) by the given mean and variance, as in inference."""
    check_axis(x, 1)
    for one in (mean, variance, weight, bias):
        a.same(one.rank, 1, "dims of a channel's statistic")
        a.same(one.shape[0], x.shape[1], "channels of a batch norm")

    def at(*i: Any) -> Any:
        channel = (i[1],)
        scale = inverse_root(a, variance[channel] + a.number(eps)) * weight[channel]
        return (x[i] - mean[channel]) * scale + bias[channel]

    return Indexed(x.shape, at)


def _standardised(a: Arithmetic, x: Any, total: Callable[..., Any], inverse: Any, eps: float, centre: bool) -> Any:
    """(x - mean) / sqrt(variance + eps), or x / sqrt(mean square + eps), over what ``total`` sums."""
    if not centre:
        return x * inverse_root(a, total(lambda one: one * one) * inverse + a.number(eps))
    mean = total(lambda one: one) * inverse
    variance = total(lambda one: one * one) * inverse - mean * mean
    return (x - mean) * inverse_root(a, variance + a.number(eps))


@operator
def layer_norm(
    a: Arithmetic, x: Indexed, weight: Indexed | None = None, bias: Indexed | None = None, *, eps: float
) -> Indexed:
    """Return x normalised over the last dim, times weight, plus bias."""
    return _last_normalised(a, x, weight, bias, eps, centre=True)


@operator
def rms_norm(a: Arithmetic, x: Indexed, weight: Indexed | None = None, *, eps: float) -> Indexed:
    """Return x divided by the root of its mean square over the last dim, times weight."""
    return _last_normalised(a, x, weight, None, eps, centre=False)


def _last_normalised(
    a: Arithmetic, x: Indexed, weight: Indexed | None, bias: Indexed | None, eps: float, *, centre: bool
) -> Indexed:
    check_axis(x, 0)
    size = x.shape[-1]
    for one in (weight, bias):
        if one is not None:
            a.same(one.rank, 1, "dims of a norm's weight")
            a.same(one.shape[0], size, "size of a norm's weight")

    def at(*i: Any) -> Any:
        def total(function: Callable[[Any], Any]) -> Any:
            return a.total(size, lambda k: function(x[(*i[:-1], k)]))

        value = _standardised(a, x[i], total, a.inverse_size(size), eps, centre)
        value = value if weight is None else value * weight[(i[-1],)]
        return value if bias is None else value + bias[(i[-1],)]

    return Indexed(x.shape, at)


@operator
def group_norm(
    a: Arithmetic, x: Indexed, weight: Indexed | None = None, bias: Indexed | None = None, *, groups: int, eps: float
) -> Indexed:
    """Return x (n, c, h, w) normalised over h, w and the c / groups channels of a group, times weight, plus bias."""
    if x.rank != 4:
        raise IllTypedError(f"a group norm takes a tensor of 4 dims, {x.rank} were given")
    per_group = a.quotient(x.shape[1], groups, "channels of a group norm")
    for one in (weight, bias):
        if one is not None:
            a.same(one.rank, 1, "dims of a norm's weight")
            a.same(one.shape[0], x.shape[1], "size of a norm's weight")

    def at(n: Any, c: Any, *place: Any) -> Any:
        first = a.divided(c, per_group)[0] * per_group

        def total(function: Callable[[Any], Any]) -> Any:
            rows, cols = x.shape[2:]
            return a.total(
                per_group,
                lambda k: a.total(rows, lambda i: a.total(cols, lambda j: function(x[(n, first + k, i, j)]))),
            )

        inverse = a.inverse_size(per_group) * a.inverse_size(x.shape[2]) * a.inverse_size(x.shape[3])
        value = _standardised(a, x[(n, c, *place)], total, inverse, eps, True)
        value = value if weight is None else value * weight[(c,)]
        return value if bias is None else value + bias[(c,)]

    return Indexed(x.shape, at)
