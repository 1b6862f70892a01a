"""Declare an operator: one function defines each number of its result.

    @operator
    def transpose(a, x, *, order):
        return Indexed(tuple(x.shape[dim] for dim in order), lambda *i: x[undo(i, order)])

``a`` is the machine that the definition runs on (`calculus.machine`); then come the operands, then, after the star, the
attributes. Shapes, values over doubles and prime fields, and proofs for all sizes follow from this one function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.rewrite.calculus import IllTypedError, Indexed

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
