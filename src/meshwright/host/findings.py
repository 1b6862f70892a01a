"""The result of one check: ok, a note or a problem, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Status = Literal["ok", "note", "problem"]

# The page with details of each remedy; a finding names the heading.
HELP_PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check.

    ``problem`` means that some function of Meshwright will fail here; ``note`` that something is slower or smaller
    than it could be. ``topic`` is the heading of the help page on it, as an anchor.
    """

    area: str
    name: str
    found: str
    status: Status = "ok"
    remedy: str = ""
    topic: str = ""

    @property
    def help_address(self) -> str:
        """The address of the help on the remedy; "" without one."""
        return f"{HELP_PAGE}#{self.topic}" if self.topic else ""

    def amended(self, status: Status, remedy: str, topic: str = "") -> Finding:
        """Return the same finding with a worse status and a remedy."""
        return replace(self, status=status, remedy=remedy, topic=topic)

    def as_row(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return asdict(self)
