"""Elementwise operators; operands have one shape (torch's implicit broadcasting is a separate `broadcast`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.calculus import Arithmetic, Indexed
from meshwright.rewrite.operators.declaration import operator

if TYPE_CHECKING:
    from collections.abc import Callable


def each(a: Arithmetic, function: Callable[..., Any], *operands: Indexed) -> Indexed:
    """The tensor of a function of operands of one shape."""
    first = operands[0]
    for other in operands[1:]:
        a.same(first.rank, other.rank, "ranks of operands")
        for one, two in zip(first.shape, other.shape, strict=True):
            a.same(one, two, "sizes of operands")
    return Indexed(first.shape, lambda *i: function(*(operand[i] for operand in operands)))


def inverse_root(a: Arithmetic, one: Any) -> Any:
    """1 / √x."""
    return a.apply("reciprocal", a.apply("sqrt", one))


def declare_function(name: str, function: str | None = None) -> None:
    """Declare the pointwise operator of a function of one number."""

    def define(a: Arithmetic, x: Indexed) -> Indexed:
        return each(a, lambda one: a.apply(function or name, one), x)

    define.__name__ = name
    operator(define)


UNARY = (
    *("exp", "log", "sqrt", "reciprocal", "tanh", "erf", "sin", "cos", "sigmoid"),
    *("sign", "floor", "ceil", "round"),
)
for _name in UNARY:
    declare_function(_name)


@operator
def add(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: one + two, x, y)


@operator
def sub(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: one - two, x, y)


@operator
def mul(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: one * two, x, y)


@operator
def div(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: one * a.apply("reciprocal", two), x, y)


@operator
def pow_(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: a.apply("power", one, two), x, y)


@operator
def neg(a: Arithmetic, x: Indexed) -> Indexed:
    return each(a, lambda one: -one, x)


@operator
def square(a: Arithmetic, x: Indexed) -> Indexed:
    return each(a, lambda one: one * one, x)


@operator
def maximum(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: a.apply("maximum", one, two), x, y)


@operator
def minimum(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: -a.apply("maximum", -one, -two), x, y)


@operator
def relu(a: Arithmetic, x: Indexed) -> Indexed:
    return each(a, lambda one: a.apply("maximum", one, a.number(0)), x)


@operator
def abs_(a: Arithmetic, x: Indexed) -> Indexed:
    return each(a, lambda one: a.apply("maximum", one, -one), x)


@operator
def rsqrt(a: Arithmetic, x: Indexed) -> Indexed:
    return each(a, lambda one: inverse_root(a, one), x)


@operator
def gelu(a: Arithmetic, x: Indexed) -> Indexed:
    half, root = a.number(0.5), a.number(math.sqrt(0.5))
    return each(a, lambda one: one * half * (a.number(1) + a.apply("erf", one * root)), x)


@operator
def gelu_tanh(a: Arithmetic, x: Indexed) -> Indexed:
    half, scale, cubic = a.number(0.5), a.number(math.sqrt(2 / math.pi)), a.number(0.044715)
    return each(
        a,
        lambda one: one * half * (a.number(1) + a.apply("tanh", (one + one * one * one * cubic) * scale)),
        x,
    )


@operator
def silu(a: Arithmetic, x: Indexed) -> Indexed:
    return each(a, lambda one: one * a.apply("sigmoid", one), x)


@operator
def clamp(a: Arithmetic, x: Indexed, *, low: float, high: float) -> Indexed:
    def limited(one: Any) -> Any:
        return -a.apply("maximum", -a.apply("maximum", one, a.number(low)), -a.number(high))

    return each(a, limited, x)


@operator(dtype="bool")
def greater(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: a.apply("greater", one, two), x, y)


@operator(dtype="bool")
def less(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: a.apply("greater", two, one), x, y)


@operator(dtype="bool")
def less_equal(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: a.apply("less_equal", one, two), x, y)


@operator(dtype="bool")
def equal(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: a.apply("equal", one, two), x, y)


@operator(dtype="bool", takes="bool")
def logical_not(a: Arithmetic, x: Indexed) -> Indexed:
    return each(a, lambda one: a.number(1) - one, x)


@operator(dtype="bool", takes="bool")
def logical_and(a: Arithmetic, x: Indexed, y: Indexed) -> Indexed:
    return each(a, lambda one, two: one * two, x, y)


@operator(takes="any")
def where(a: Arithmetic, condition: Indexed, x: Indexed, y: Indexed) -> Indexed:
    return each(a, a.select, condition, x, y)


@operator(dtype="attribute", takes="any")
def bitcast(a: Arithmetic, x: Indexed, *, dtype: str) -> Indexed:
    """Bytes read as another dtype of the same width."""
    return each(a, lambda one: a.apply(f"bitcast:{dtype}", one), x)


@operator(dtype="attribute", takes="any")
def cast(a: Arithmetic, x: Indexed, *, dtype: str) -> Indexed:
    """Numbers converted; rounding has no known laws, so casts have laws only if both sides cast."""
    return each(a, lambda one: a.apply(f"cast:{dtype}", one), x)


@operator
def full(a: Arithmetic, *, shape: tuple[Any, ...], value: float) -> Indexed:
    """The same number everywhere."""
    return Indexed(tuple(shape), lambda *i: a.number(value))
