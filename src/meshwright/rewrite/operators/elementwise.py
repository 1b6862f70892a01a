"""`operator`, the decorator that declares an operator, and the elementwise operators.

An operator is declared by one function that defines each element of its result:

    @operator
    def transpose(a, x, *, order):
        return Indexed(tuple(x.shape[dim] for dim in order), lambda *i: x[undo(i, order)])

``a`` is the arithmetic on which the definition runs (`calculus.whole.Arithmetic`: symbols, doubles or a prime field).
Then come the operands and, after the star, the attributes. The result's shape, its values and proofs for all sizes
follow from this one function.
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
    """A declared operator; ``define`` is the function that defines the elements of its result.

    ``fewest`` and ``most``: bounds on the number of operands (``most`` None: no upper bound). ``attributes``: names, in
    order. ``dtype``: the result's dtype: "first" (that of the first operand), "bool", or "attribute" (the value of the
    attribute ``dtype``). ``takes``: the kind of the operands' elements: "number" (floating-point), "bool", or "any"
    (any dtype, the same for all operands).
    """

    name: str
    define: Definition
    fewest: int
    most: int | None
    attributes: tuple[str, ...]
    dtype: ResultDtype = "first"
    takes: Takes = "number"

    def check(self, num_operands: int, attributes: dict[str, Any]) -> None:
        """Raise IllTypedError for a wrong number of operands or for missing or unknown attributes."""
        if num_operands < self.fewest or (self.most is not None and num_operands > self.most):
            most = "more" if self.most is None else self.most
            raise IllTypedError(f"{self.name} takes {self.fewest} to {most} operands, {num_operands} were given")
        if set(attributes) != set(self.attributes):
            raise IllTypedError(
                f"{self.name} has the attributes {list(self.attributes)}; {sorted(attributes)} were given"
            )


OPERATORS: dict[str, Operator] = {}


def operator(define: Definition | None = None, *, dtype: ResultDtype = "first", takes: Takes = "number") -> Any:
    """Declare an operator: a decorator for its definition, whose name (without a final _) becomes the operator's.

    ``dtype`` and ``takes`` as in `Operator`. Raises ValueError if an operator of that name exists.
    """

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
    """Return the tensor whose elements are ``function`` of the operands' elements at the same index.

    All operands must have the same shape.
    """
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
    """Declare the elementwise operator ``name`` that applies a function of one number (by default that of its name)."""

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
    """Return the bytes of x read as another dtype of the same width (torch's ``view(dtype)``)."""
    return each(a, lambda one: a.apply(f"bitcast:{dtype}", one), x)


@operator(dtype="attribute", takes="any")
def cast(a: Arithmetic, x: Indexed, *, dtype: str) -> Indexed:
    """Return x converted to another dtype.

    Rounding has no algebraic law but idempotence, so a rule can only be proved if both sides cast.
    """
    return each(a, lambda one: a.apply(f"cast:{dtype}", one), x)


@operator
def full(a: Arithmetic, *, shape: tuple[Any, ...], value: float) -> Indexed:
    """Return a tensor of the given shape in which every element is ``value``."""
    return Indexed(tuple(shape), lambda *i: a.number(value))
