"""Declare an operator (`operator`) by one function that defines each number of its result; elementwise operators.

    @operator
    def transpose(a, x, *, order):
        return Indexed(tuple(x.shape[dim] for dim in order), lambda *i: x[undo(i, order)])

``a`` is the machine that the definition runs on (`calculus.whole`); then come the operands, then, after the star, the
attributes. Shapes, values over doubles and prime fields, and proofs for all sizes follow from this one function.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.rewrite.calculus import Arithmetic, IllTypedError, Indexed

Definition = Callable[..., Indexed]
ResultDtype = Literal["first", "bool", "attribute"]
Takes = Literal["number", "bool", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A declared operator.

    ``fewest`` and ``most``: the number of operands (None: any number). ``attributes``: names, in order. ``dtype``: the
    result's: that of the first operand, "bool", or that of the attribute ``dtype``. ``takes``: what its operands hold:
    floating-point numbers, truth values, or anything, all the same.
    """

    name: str
    define: Definition
    fewest: int
    most: int | None
    attributes: tuple[str, ...]
    dtype: ResultDtype = "first"
    takes: Takes = "number"

    def check(self, num_operands: int, attributes: dict[str, Any]) -> None:
        """Raise IllTypedError if operands or attributes are missing or too many."""
        if num_operands < self.fewest or (self.most is not None and num_operands > self.most):
            most = "more" if self.most is None else self.most
            raise IllTypedError(f"{self.name} takes {self.fewest} to {most} operands, {num_operands} were given")
        if set(attributes) != set(self.attributes):
            raise IllTypedError(f"{self.name} has the attributes {list(self.attributes)}, given: {sorted(attributes)}")


OPERATORS: dict[str, Operator] = {}


def operator(define: Definition | None = None, *, dtype: ResultDtype = "first", takes: Takes = "number") -> Any:
    """Declare the operator of this function's name."""

    def declare(function: Definition) -> Definition:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        operands = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        name = function.__name__.rstrip("_")
        if name in OPERATORS:
            raise ValueError(f"An operator {name!r} is declared already; choose another name.")
        OPERATORS[name] = Operator(
            name=name,
            define=function,
            fewest=sum(p.default is p.empty for p in operands),
            most=None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(operands),
            attributes=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
            dtype=dtype,
            takes=takes,
        )
        return function

    return declare if define is None else declare(define)


# Operands of elementwise operators have one shape (torch's implicit broadcasting is a separate `broadcast`).
def each(a: Arithmetic, function: Callable[..., Any], *operands: Indexed) -> Indexed:
    """Return the tensor of a function of operands of one shape."""
    first = operands[0]
    for other in operands[1:]:
        a.same(first.rank, other.rank, "ranks of operands")
        for one, two in zip(first.shape, other.shape, strict=True):
            a.same(one, two, "sizes of operands")
    return Indexed(first.shape, lambda *i: function(*(operand[i] for operand in operands)))


def inverse_root(a: Arithmetic, one: Any) -> Any:
    """Return 1 / √x."""
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
    """Return bytes read as another dtype of the same width."""
    return each(a, lambda one: a.apply(f"bitcast:{dtype}", one), x)


@operator(dtype="attribute", takes="any")
def cast(a: Arithmetic, x: Indexed, *, dtype: str) -> Indexed:
    """Return numbers converted; rounding has no known laws, so casts have laws only if both sides cast."""
    return each(a, lambda one: a.apply(f"cast:{dtype}", one), x)


@operator
def full(a: Arithmetic, *, shape: tuple[Any, ...], value: float) -> Indexed:
    """Return the same number everywhere."""
    return Indexed(tuple(shape), lambda *i: a.number(value))
