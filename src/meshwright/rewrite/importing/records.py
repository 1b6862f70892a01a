"""The common form of a rule in TASO's and Unity's files: one list of operators per side, and the equal outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.rewrite.expressions import Expression, Name
from meshwright.spec import RewriteError


@dataclass(frozen=True, slots=True)
class Record:
    """One operator of a rule file: its type, its operands and its parameters by name.

    An operand is (index of an operator in the list, number of that operator's output). A negative index is an input
    tensor of the rule.
    """

    kind: str
    operands: tuple[tuple[int, int], ...]
    parameters: dict[str, int]


def term(records: list[Record], place: int, output: int, build: Build, depth: int = 0) -> Expression:
    """Return the expression of output ``output`` of operator ``place``; ``build`` makes each operator's expression.

    Raises RewriteError if an operator refers to a missing operator or to itself.
    """
    if place < 0:
        return Name(f"x{-place}")
    if place >= len(records) or depth > len(records):
        raise RewriteError(
            f"The rule file is damaged: a rule refers to operator {place}, but has {len(records)} operators (numbered "
            "from 0), or its references are circular."
        )
    record = records[place]
    operands = [term(records, other, number, build, depth + 1) for other, number in record.operands]
    return build(record, operands, output, place)


Build = Callable[[Record, list[Expression], int, int], Expression]
