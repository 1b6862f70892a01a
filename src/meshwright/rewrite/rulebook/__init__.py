"""The rule book: a file of rewrite rules that were generated or written by hand, and then proved.

Reading a rule book needs neither the generator nor the prover (z3).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from meshwright.rewrite.rules import Rule, rule_of
from meshwright.rewrite.special import Special
from meshwright.spec import RewriteError, write_text

SCHEMA_VERSION = 2
_AGAIN = "Make it again with `meshwright optimize rules generate --out FILE`."
ShippedBook = Literal["generated", "torch", "xla"]
_MOST_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BookRule:
    """A proved rule of a rule book.

    ``ranks``: the combinations of ranks (numbers of dims) for which the rule is proved, each with one rank for each
    tensor of ``rule.names``. ``special``: the rule's effect on NaN and infinity. ``basis``: True if the rule belongs
    to the basis, the rules from which all others of the book follow.
    """

    rule: Rule
    ranks: tuple[tuple[int, ...], ...]
    special: Special
    basis: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleBook:
    """Rules with their origin.

    ``provenance`` describes how the rules were made, for example the generator's domain and its number of terms.
    """

    rules: tuple[BookRule, ...]
    provenance: dict[str, Any]

    @property
    def basis(self) -> tuple[BookRule, ...]:
        """The rules of the basis, from which all rules of the book follow."""
        return tuple(entry for entry in self.rules if entry.basis)


@cache
def shipped_rule_book(name: ShippedBook = "generated") -> RuleBook:
    """Return a rule book that ships with Meshwright.

    The rules of "generated" were found by the generator. Those of "torch" and "xla" were written by hand and proved.
    """
    data = files("meshwright.rewrite.rulebook").joinpath(f"{name}.json.gz").read_bytes()
    return parse_rule_book(json.loads(gzip.decompress(data)), f"the shipped rule book {name!r}")


def read_rule_book(path: str | Path) -> RuleBook:
    """Return the rules of a file that `write_rule_book` wrote. Raises RewriteError for any other file."""
    place = Path(path)
    try:
        if place.stat().st_size > _MOST_BYTES:
            raise RewriteError(f"{place} has more than {_MOST_BYTES:,} bytes, the most that a rule book may have.")
        document = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise RewriteError(f"{place} cannot be read: {error.strerror}. Give the path of a rule book.") from error
    except (ValueError, RecursionError) as error:
        raise RewriteError(f"{place} is not a JSON document ({error}); give a rule book.") from error
    return parse_rule_book(document, str(place))


def parse_rule_book(document: Any, place: str) -> RuleBook:
    """Return the rule book of a parsed JSON document; ``place`` names its origin in error messages.

    Raises RewriteError for a document of another schema version or a damaged one.
    """
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise RewriteError(f"{place} is not a rule book of schema version {SCHEMA_VERSION}. {_AGAIN}")
    try:
        rules = tuple(_entry(entry, place) for entry in document["rules"])
        return RuleBook(rules=rules, provenance=dict(document["provenance"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RewriteError(f"{place} is a damaged rule book ({type(error).__name__}: {error}). {_AGAIN}") from error


def write_rule_book(book: RuleBook, path: str | Path) -> None:
    """Write a rule book to ``path`` as JSON, in the format of `read_rule_book`."""
    rules = [_document(entry) for entry in book.rules]
    document = {"schema_version": SCHEMA_VERSION, "provenance": book.provenance, "rules": rules}
    write_text(json.dumps(document, indent=1) + "\n", path)


def _document(entry: BookRule) -> dict[str, Any]:
    rule = entry.rule
    return {
        "name": rule.name,
        "left": [str(side) for side in rule.left],
        "right": [str(side) for side in rule.right],
        **({"when": [str(condition) for condition in rule.when]} if rule.when else {}),
        **({"ranks": dict(rule.ranks)} if rule.ranks else {}),
        "source": rule.source,
        "proved": [list(ranks) for ranks in entry.ranks],
        **({"lost": list(entry.special.lost)} if entry.special.lost else {}),
        **({"changed": list(entry.special.changed)} if entry.special.changed else {}),
        **({"basis": True} if entry.basis else {}),
    }


def _entry(entry: dict[str, Any], place: str) -> BookRule:
    sides: list[Sequence[str]] = [entry["left"], entry["right"]]
    if not all(isinstance(side, str) for part in sides for side in part):
        raise RewriteError(
            f"{place} is not a valid rule book: left or right of rule {entry.get('name')!r} is not a list of strings. "
            f"{_AGAIN}"
        )
    rule = rule_of(
        str(entry["name"]),
        *sides,
        when=entry.get("when", ()),
        ranks=entry.get("ranks"),
        source=str(entry["source"]),
    )
    ranks = tuple(tuple(map(int, ranks)) for ranks in entry["proved"])
    if any(len(each) != len(rule.names) for each in ranks):
        raise RewriteError(
            f"In {place}, an entry of 'proved' of rule {rule.name!r} does not have one rank for each of its tensors "
            f"{', '.join(rule.names)}. Generate the rule book again."
        )
    special = Special(lost=tuple(map(str, entry.get("lost", ()))), changed=tuple(map(str, entry.get("changed", ()))))
    return BookRule(rule=rule, ranks=ranks, special=special, basis=entry.get("basis") is True)
