"""The common form of TASO's and Unity's rule files: two lists of operators, and which outputs are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.rewrite.expressions import Expression, Name
from meshwright.spec import RewriteError


@dataclass(frozen=True, slots=True)
class Record:
    """One operator: its type, (operator, output) of its operands, its parameters.

    An operand of a negative operator is one of the rule's own inputs.
    """

    kind: str
    operands: tuple[tuple[int, int], ...]
    parameters: dict[str, int]


def term(records: list[Record], place: int, output: int, build: Build, depth: int = 0) -> Expression:
    """Return the expression of an output of an operator; RewriteError for records with dangling references."""
    if place < 0:
        return Name(f"x{-place}")
    if place >= len(records) or depth > len(records):
        raise RewriteError(f"An operator refers to operator {place} of {len(records)}; the rule file is damaged.")
    record = records[place]
    operands = [term(records, other, number, build, depth + 1) for other, number in record.operands]
    return build(record, operands, output, place)


Build = Callable[[Record, list[Expression], int, int], Expression]
