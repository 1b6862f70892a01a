"""Settings: a file for another system, what the user has to fill in, and what the file cannot express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid:
    """A decision of the plan for which the other system has no setting, with the reason or what the system does."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A plan in another system's words.

    ``values`` are the settings by their names there, ``text`` is the file with them (usually named ``file_name``),
    ``start`` the line that uses it. ``version`` is the release whose names these are. ``has_comments``: the text starts
    with the `notes`.
    """

    system: str
    version: str
    file_name: str
    values: Mapping[str, Any]
    text: str
    start: str
    fill_in: tuple[str, ...]
    unsaid: tuple[Unsaid, ...]
    has_comments: bool = True


def notes(start: str, fill_in: Sequence[str], unsaid: Sequence[Unsaid]) -> list[str]:
    """What people have to know about a file, in lines."""
    lines = [f"Start: {start}"]
    lines += [f"Fill in: {item}" for item in fill_in]
    lines += [f"Not expressed: {item.what}: {item.reason}" for item in unsaid]
    return lines


def comment(lines: Sequence[str], mark: str = "# ") -> str:
    """Lines as comments, whatever a name in them holds."""
    return "".join(f"{mark}{' '.join(line.split())}\n" for line in lines)
