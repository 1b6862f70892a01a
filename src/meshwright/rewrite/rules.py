"""`Rule`: two sides of expressions that compute the same tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.rewrite.expressions import (
    Condition,
    Expression,
    condition_names,
    given_names,
    letters_of,
    names_of,
    parse,
    parse_condition,
    shape_names,
)
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``left[i]`` may be replaced by ``right[i]``, all outputs at once, if all conditions of ``when`` hold.

    ``ranks``: dims of tensors by name, if the rule is meant for these only. ``source``: its origin: a file and a
    position in it, or how it was found.
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
                    f"Rule {self.name!r} has the condition {condition}, but neither side has {sorted(unknown)}."
                )
        missing = {name for side in (*self.left, *self.right) for name in shape_names(side)} - {
            name for side in (*self.left, *self.right) for name in given_names(side)
        }
        if missing:
            raise RewriteError(f"Rule {self.name!r} reads the shape of {sorted(missing)}, which neither side has.")

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors that are given, in order of first use, those of the left first."""
        return tuple(dict.fromkeys(name for side in (*self.left, *self.right) for name in names_of(side)))

    @property
    def letters(self) -> tuple[tuple[str, str], ...]:
        """(letter, the first "operator.attribute" that it is, "" if it is only part of some), left before right."""
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
    """A rule from texts. Raises RewriteError for invalid ones."""
    sides = [tuple(map(parse, [side] if isinstance(side, str) else side)) for side in (left, right)]
    return Rule(
        name=name,
        left=sides[0],
        right=sides[1],
        when=tuple(map(parse_condition, when)),
        ranks=tuple((ranks or {}).items()),
        source=source,
    )
