"""Read files of rewrite rules, also those of TASO and Unity.

`read_rule_file` chooses the format by the file's suffix: Meshwright's TOML (``.toml``), TASO's protobuf (``.pb``),
Unity's JSON or a rule book (``.json``).
"""

from __future__ import annotations

from pathlib import Path

from meshwright.rewrite.importing.taso import read_taso
from meshwright.rewrite.importing.unity import read_unity
from meshwright.rewrite.rulebook import read_rule_book
from meshwright.rewrite.rules import Rule, read_rules
from meshwright.spec import RewriteError

__all__ = ["read_rule_file", "read_taso", "read_unity"]


def read_rule_file(path: str | Path) -> list[Rule]:
    """Return the rules of a file of any supported format. Raises RewriteError for a missing or any other file."""
    place = Path(path)
    readers = {".toml": read_rules, ".pb": read_taso, ".json": _read_json}
    if place.suffix not in readers:
        raise RewriteError(
            f"{place} ends in {place.suffix or 'nothing'!r}; expected a file of rules: Meshwright's (.toml), TASO's "
            "(.pb), Unity's (.json) or a rule book (.json)."
        )
    if not place.is_file():
        raise RewriteError(f"There is no file {place}. Give the path of a file of rules.")
    return readers[place.suffix](place)


def _read_json(place: Path) -> list[Rule]:
    with place.open("rb") as file:
        start = file.read(4096)
    if b'"schema_version"' in start:
        return [entry.rule for entry in read_rule_book(place).rules]
    return read_unity(place)
