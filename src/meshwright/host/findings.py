"""The result of one check of `meshwright doctor`: a status, what was found, and how to fix it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Status = Literal["ok", "note", "problem"]

# The page with details of each remedy; a finding names the heading.
HELP_PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check.

    ``area`` is one of `host_checks.AREAS`, ``name`` the thing that was checked, ``found`` the result as text, and
    ``remedy`` what the user can do ("" for status ``ok``). Status ``problem``: some function of Meshwright will fail
    on this machine. Status ``note``: something is slower or smaller than it could be. ``topic`` is the anchor of the
    heading in docs/troubleshooting.md that explains the remedy.
    """

    area: str
    name: str
    found: str
    status: Status = "ok"
    remedy: str = ""
    topic: str = ""

    @property
    def help_address(self) -> str:
        """The page and heading that explain the remedy (``docs/troubleshooting.md#topic``); "" without a topic."""
        return f"{HELP_PAGE}#{self.topic}" if self.topic else ""

    def amended(self, status: Status, remedy: str, topic: str = "") -> Finding:
        """Return a copy of the finding with another status, remedy and topic."""
        return replace(self, status=status, remedy=remedy, topic=topic)

    def as_row(self) -> dict[str, Any]:
        """Return the finding as a dict of its fields, for JSON."""
        return asdict(self)
