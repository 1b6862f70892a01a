"""`Rule`: two sides, each of one or more expressions, that compute the same tensors.

Also reads files of rules (`read_rules`) and finds rules whose operators demand different kinds of elements
(`conflict`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.expressions import (
    Call,
    Condition,
    Expression,
    Name,
    condition_names,
    given_names,
    letters_of,
    names_of,
    parse,
    parse_condition,
    shape_names,
)
from meshwright.rewrite.operators import OPERATORS
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rewrite rule: each output ``left[i]`` equals ``right[i]`` if all conditions of ``when`` hold.

    All outputs of a rule are replaced together. ``ranks``: (tensor, number of dims) pairs, if the rule holds only for
    tensors of these ranks. ``source``: where the rule comes from: a file and a position in it, or how it was found.
    """

    name: str
    left: tuple[Expression, ...]
    right: tuple[Expression, ...]
    when: tuple[Condition, ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if not self.left or len(self.left) != len(self.right):
            raise RewriteError(
                f"Rule {self.name!r} has {len(self.left)} outputs on the left and {len(self.right)} on the right; "
                "expected the same number, at least one."
            )
        # Reading all names finds shapes of names that are not tensors.
        known, letters = set(self.names), {letter for letter, _ in self.letters}
        for condition in self.when:
            tensors, used = condition_names(condition)
            unknown = (tensors - known) | (used - letters)
            if unknown:
                raise RewriteError(
                    f"Rule {self.name!r} has the condition {condition}, but the names {sorted(unknown)} occur on "
                    "neither side of the rule."
                )
        missing = {name for side in (*self.left, *self.right) for name in shape_names(side)} - {
            name for side in (*self.left, *self.right) for name in given_names(side)
        }
        if missing:
            raise RewriteError(
                f"Rule {self.name!r} reads the shape of {sorted(missing)}, but neither side has a tensor of that name."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rule's tensors, in order of first use, left side first."""
        return tuple(dict.fromkeys(name for side in (*self.left, *self.right) for name in names_of(side)))

    @property
    def letters(self) -> tuple[tuple[str, str], ...]:
        """(name, role) of each letter (symbolic attribute), in order of first use, left side first.

        The role is the first "operator.attribute" that the letter fills by itself; "" if the letter occurs only inside
        tuples and formulas.
        """
        found: dict[str, str] = {}
        for side in (*self.left, *self.right):
            for place, letter in letters_of(side):
                found[letter] = found.get(letter) or place
        return tuple(found.items())

    def __str__(self) -> str:
        when = f"  when  {', '.join(map(str, self.when))}" if self.when else ""
        return f"{', '.join(map(str, self.left))}  =  {', '.join(map(str, self.right))}{when}"


def rule_of(
    name: str,
    left: str | Sequence[str],
    right: str | Sequence[str],
    *,
    when: Sequence[str] = (),
    ranks: Mapping[str, int] | None = None,
    source: str = "",
) -> Rule:
    """Return the rule that texts describe (syntax: `expressions`); several outputs are given as sequences.

    Raises RewriteError for invalid texts.
    """
    sides = [tuple(map(parse, [side] if isinstance(side, str) else side)) for side in (left, right)]
    return Rule(
        name=name,
        left=sides[0],
        right=sides[1],
        when=tuple(map(parse_condition, when)),
        ranks=tuple((ranks or {}).items()),
        source=source,
    )


_MOST_BYTES = 8 * 2**20
_KEYS = {"name", "left", "right", "when", "ranks", "source"}


# Files are TOML tables ``[[rule]]`` with name, left, right and, if needed, when, ranks and source; for example left
# "matmul(x, concat(y, z, axis=1))" and right "concat(matmul(x, y), matmul(x, z), axis=1)" with ranks x = 2.
def read_rules(path: str | Path) -> list[Rule]:
    """Return the rules of a TOML file, in order. Raises RewriteError with the number of the rule that is invalid."""
    place = Path(path)
    try:
        if place.stat().st_size > _MOST_BYTES:
            raise RewriteError(f"{place} has more than {_MOST_BYTES:,} bytes, the most that a file of rules may have.")
        document = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise RewriteError(f"{place} cannot be read: {error.strerror}. Give the path of a file of rules.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RewriteError(f"{place} is not a TOML file ({error}); write rules as [[rule]] tables.") from error
    return parse_rules(document, str(place))


def parse_rules(document: dict[str, Any], place: str) -> list[Rule]:
    """Return the rules of a parsed TOML document; ``place``, a path, names its origin in error messages.

    Raises RewriteError for an invalid document or rule.
    """
    entries = document.get("rule")
    if set(document) - {"rule", "title", "about"} or not isinstance(entries, list) or not entries:
        raise RewriteError(
            f"{place} has the keys {sorted(document)}; expected tables [[rule]], at least one, besides title and about."
        )
    rules = []
    for number, entry in enumerate(entries, 1):
        where = f"Rule {number} of {place}"
        if not isinstance(entry, dict):
            raise RewriteError(f"{where} is {entry!r}; expected a table with left and right.")
        if set(entry) - _KEYS or not {"left", "right"} <= set(entry):
            raise RewriteError(
                f"{where} has the keys {sorted(entry)}; expected left and right, and no other keys than "
                f"{sorted(_KEYS)}."
            )
        try:
            rules.append(_rule(entry, f"{Path(place).stem} {number}"))
        except RewriteError as error:
            raise RewriteError(f"{where}: {error}") from error
    twice = {rule.name for rule in rules if sum(other.name == rule.name for other in rules) > 1}
    if twice:
        raise RewriteError(f"{place} has several rules of the name {sorted(twice)[0]!r}; give each a name of its own.")
    return rules


def _rule(entry: dict[str, Any], usual_name: str) -> Rule:
    name, source = entry.get("name", usual_name), entry.get("source", "")
    ranks, when = entry.get("ranks", {}), entry.get("when", [])
    when = [when] if isinstance(when, str) else when
    sides = [[side] if isinstance(side, str) else side for side in (entry["left"], entry["right"])]
    texts = (name, source, *when, *sides[0], *sides[1]) if all(isinstance(s, list) for s in (*sides, when)) else (0,)
    if not all(isinstance(text, str) for text in texts):
        raise RewriteError("name, source, left, right and when must be strings or lists of strings.")
    if not (isinstance(ranks, dict) and all(type(rank) is int and 0 <= rank <= 8 for rank in ranks.values())):
        raise RewriteError(f"ranks = {ranks!r} was given; expected a table of numbers of dims, like {{ x = 2 }}.")
    return rule_of(name, sides[0], sides[1], when=when, ranks=ranks, source=source)


_NUMBER, _WHOLE, _TRUTH = "floating-point numbers", "whole numbers", "truth values"


def kind_of(dtype: str) -> str:
    """Return the kind of a dtype's values: floating-point numbers, whole numbers or truth values."""
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


# Kinds of tensor elements are floats, whole numbers or truth values; a rule that would mix them never applies.
# Arithmetic is about floating-point numbers: whole ones overflow and divide differently, truth values do not add.
def conflict(rule: Rule) -> str | None:
    """Return why a rule can never apply because operators demand different kinds of one tensor; None if it can."""
    kinds = _Kinds()
    try:
        for left, right in zip(rule.left, rule.right, strict=True):
            kinds.same(kinds.of(left), kinds.of(right))
    except _ConflictError as found:
        return f"one tensor would hold {found}"
    return None
