"""What became of a file of another tool: its rows, and what was left out for which reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.records.record_table import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The rows of an imported file.

    ``kind``: the format that was recognised. ``left_out``: the number of entries that became no row, by reason.
    """

    kind: str
    records: Records
    left_out: dict[str, int] = field(default_factory=dict)
