"""Files of rules: TOML tables ``[[rule]]`` with name, left, right and, if needed, when, ranks and source.

[[rule]]
name = "matmul of a concat"
left = "matmul(x, concat(y, z, axis=1))"
right = "concat(matmul(x, y), matmul(x, z), axis=1)"
ranks = { x = 2 }
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from meshwright.rewrite.rules import Rule, rule_of
from meshwright.spec import RewriteError

_MOST_BYTES = 8 * 2**20
_KEYS = {"name", "left", "right", "when", "ranks", "source"}


def read_rules(path: str | Path) -> list[Rule]:
    """The rules of a file, in order. Raises RewriteError with the position of the error."""
    place = Path(path)
    try:
        if place.stat().st_size > _MOST_BYTES:
            raise RewriteError(f"{place} has more than {_MOST_BYTES:,} bytes; a file of rules is smaller.")
        document = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise RewriteError(f"{place} cannot be read: {error.strerror}. Give a file of rules.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RewriteError(f"{place} is not a TOML file ({error}); write rules as [[rule]] tables.") from error
    return parse_rules(document, str(place))


def parse_rules(document: dict[str, Any], place: str) -> list[Rule]:
    """The rules of a document that was read from ``place``."""
    entries = document.get("rule")
    if set(document) - {"rule", "title", "about"} or not isinstance(entries, list) or not entries:
        raise RewriteError(
            f"{place} has the keys {sorted(document)}; expected tables [[rule]], at least one, beside title and about."
        )
    rules = []
    for number, entry in enumerate(entries, 1):
        where = f"Rule {number} of {place}"
        if not isinstance(entry, dict) or set(entry) - _KEYS or not {"left", "right"} <= set(entry):
            raise RewriteError(f"{where} has {sorted(entry)}; expected left and right, and at most {sorted(_KEYS)}.")
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
        raise RewriteError("name, source, left, right and when must be texts or lists of texts.")
    if not (isinstance(ranks, dict) and all(type(rank) is int and 0 <= rank <= 8 for rank in ranks.values())):
        raise RewriteError(f"ranks = {ranks!r} was given; expected a table of numbers of dims, like {{ x = 2 }}.")
    return rule_of(name, sides[0], sides[1], when=when, ranks=ranks, source=source)
