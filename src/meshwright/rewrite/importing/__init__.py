"""Rule files of other systems, read as rules.

`read_rule_file` tells by the name what a file is: our TOML, TASO's protobuf (``.pb``), or Unity's JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.rewrite.importing.taso import read_taso
from meshwright.rewrite.importing.unity import read_unity
from meshwright.rewrite.rulefile import read_rules
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from meshwright.rewrite.rules import Rule

__all__ = ["read_rule_file", "read_taso", "read_unity"]


def read_rule_file(path: str | Path) -> list[Rule]:
    """The rules of a file of any kind. Raises RewriteError for a file that is none."""
    place = Path(path)
    readers = {".toml": read_rules, ".pb": read_taso, ".json": read_unity}
    if place.suffix not in readers:
        raise RewriteError(
            f"{place} ends in {place.suffix or 'nothing'!r}; expected rules in .toml, a file of TASO (.pb) or one of "
            "Unity (.json)."
        )
    if not place.is_file():
        raise RewriteError(f"There is no file {place}. Give a file of rules.")
    return readers[place.suffix](place)
