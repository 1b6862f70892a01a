"""Kinds of tensor elements: floats, whole numbers or truth values; a rule that would mix them never applies.

Arithmetic is about floating-point numbers: whole ones overflow and divide differently, truth values do not add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.rewrite.expressions import Call, Expression, Name
from meshwright.rewrite.operators import OPERATORS

if TYPE_CHECKING:
    from meshwright.rewrite.rules import Rule

_NUMBER, _WHOLE, _TRUTH = "floating-point numbers", "whole numbers", "truth values"


def kind_of(dtype: str) -> str:
    """The kind of a dtype's values."""
    if dtype == "bool":
        return _TRUTH
    return _NUMBER if dtype.startswith(("float", "bfloat")) else _WHOLE


class _ConflictError(Exception):
    """A tensor would hold two kinds."""


class _Kinds:
    """Kinds of a rule's tensors; an expression's is a kind, or the name of the tensor whose kind it has."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def find(self, kind: str) -> str:
        while kind in self._of:
            kind = self._of[kind]
        return kind

    def same(self, one: str, other: str) -> str:
        one, other = self.find(one), self.find(other)
        if one == other:
            return one
        fixed = (_NUMBER, _WHOLE, _TRUTH)
        if one in fixed and other in fixed:
            raise _ConflictError(f"{one} and {other}")
        if one in fixed:
            one, other = other, one
        self._of[one] = other
        return other

    def of(self, expression: Expression) -> str:
        if isinstance(expression, Name):
            return self.find(f"tensor {expression.name}")
        operands = [self.of(operand) for operand in expression.operands]
        declared = OPERATORS[expression.operator]
        if declared.name == "where":
            self.same(operands[0], _TRUTH)
            return self.same(operands[1], operands[2])
        if declared.name == "embedding":
            self.same(operands[1], _WHOLE)
            return operands[0]
        if declared.takes == "any":
            for operand in operands[1:]:
                self.same(operands[0], operand)
        else:
            for operand in operands:
                self.same(operand, _NUMBER if declared.takes == "number" else _TRUTH)
        if declared.dtype == "bool":
            return _TRUTH
        if declared.dtype == "attribute":
            return self._made(expression)
        return operands[0] if operands else _NUMBER

    def _made(self, expression: Call) -> str:
        dtype = dict(expression.attributes)["dtype"]
        return kind_of(dtype) if isinstance(dtype, str) else f"dtype {dtype}"


def conflict(rule: Rule) -> str | None:
    """Why no tensors fit both sides of a rule because of their kinds; None if some do."""
    kinds = _Kinds()
    try:
        for left, right in zip(rule.left, rule.right, strict=True):
            kinds.same(kinds.of(left), kinds.of(right))
    except _ConflictError as found:
        return f"one tensor would hold {found}"
    return None
