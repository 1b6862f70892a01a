"""The rule book: rules that were generated and proved, as data. Reading it needs neither the generator nor a prover."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.rules import rule_of
from meshwright.spec import RewriteError
from meshwright.spec.files import write_text

if TYPE_CHECKING:
    from meshwright.rewrite.rules import Rule

SCHEMA_VERSION = 1
_MOST_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BookRule:
    """A proved rule. ``basis``: the others follow from those of the basis.

    ``keeps_special``: whether NaN and infinity stay where they are; without, it is for finite numbers only.
    """

    rule: Rule
    basis: bool
    keeps_special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleBook:
    """Rules with how they were made: ``provenance`` says the domain, how many terms, and which program."""

    rules: tuple[BookRule, ...]
    provenance: dict[str, Any]

    @property
    def basis(self) -> tuple[BookRule, ...]:
        """The rules from which all follow."""
        return tuple(entry for entry in self.rules if entry.basis)


@cache
def shipped_rule_book() -> RuleBook:
    """The rules that ship with Meshwright."""
    data = files("meshwright.rewrite.rulebook").joinpath("generated.json.gz").read_bytes()
    return parse_rule_book(json.loads(gzip.decompress(data)), "the shipped rule book")


def read_rule_book(path: str | Path) -> RuleBook:
    """The rules of a file that `write_rule_book` wrote. Raises RewriteError for a file that is none."""
    place = Path(path)
    try:
        if place.stat().st_size > _MOST_BYTES:
            raise RewriteError(f"{place} has more than {_MOST_BYTES:,} bytes; no rule book is that large.")
        document = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise RewriteError(f"{place} cannot be read: {error.strerror}. Give a rule book.") from error
    except (ValueError, RecursionError) as error:
        raise RewriteError(f"{place} is no JSON document ({error}); give a rule book.") from error
    return parse_rule_book(document, str(place))


def parse_rule_book(document: Any, place: str) -> RuleBook:
    """A rule book from its document."""
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise RewriteError(f"{place} is no rule book of schema version {SCHEMA_VERSION}. Generate it again.")
    try:
        rules = tuple(_entry(entry, place) for entry in document["rules"])
        return RuleBook(rules=rules, provenance=dict(document["provenance"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RewriteError(f"{place} is a damaged rule book ({type(error).__name__}: {error}).") from error


def write_rule_book(book: RuleBook, path: str | Path) -> None:
    """Write a rule book as JSON."""
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
        "basis": entry.basis,
        "keeps_special": entry.keeps_special,
    }


def _entry(entry: dict[str, Any], place: str) -> BookRule:
    sides: list[Sequence[str]] = [entry["left"], entry["right"]]
    if not all(isinstance(side, str) for part in sides for side in part):
        raise RewriteError(f"{place} has a rule {entry.get('name')!r} whose sides are no texts.")
    rule = rule_of(
        str(entry["name"]),
        *sides,
        when=entry.get("when", ()),
        ranks=entry.get("ranks"),
        source=str(entry["source"]),
    )
    return BookRule(rule=rule, basis=entry["basis"] is True, keeps_special=entry["keeps_special"] is True)
