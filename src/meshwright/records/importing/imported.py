"""The result of importing a file of another tool: its rows, and the number of entries left out by reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.records.record_table import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The rows of an imported file.

    ``kind``: the recognised format, in words. ``left_out``: the number of entries without a row, by reason.
    """

    kind: str
    records: Records
    left_out: dict[str, int] = field(default_factory=dict)
