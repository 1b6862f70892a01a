"""Format single values of rows. The ending of a key names the unit: ``step_s`` is ``1.24 ms`` under "step"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from meshwright.spec import format_bytes, format_flops, format_percent, format_seconds


def _signed_percent(error: float) -> str:
    return f"{100 * error:+.1f} %"


# A longer ending comes before a shorter one: "_bytes_per_s" ends with "_s" too.
_FORMATS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_bytes_per_s", lambda value: f"{format_bytes(value)}/s"),
    ("_flops_per_s", lambda value: f"{format_flops(value)}/s"),
    ("_bytes", format_bytes),
    ("_flops", format_flops),
    ("_share", format_percent),
    ("_spread", format_percent),
    ("_error", _signed_percent),
    ("_per_s", lambda value: f"{value:.4g}"),
    ("_s", format_seconds),
)
# Endings that are words of the heading, not units.
_KEPT = ("_share", "_spread", "_error", "_per_s")
NOTHING = "–"

# Headings that would not fit a terminal of 80 columns, or could be confused with another.
_OTHER = {"communication_s": "transfers_s", "num_measured": "times_measured"}


def name_schedule_briefly(schedule: str) -> str:
    """Return the name of a schedule, that of a user's file without its folders: ``1f1b``, ``mine.py:waves``."""
    if schedule.endswith(".csv"):
        return PurePath(schedule).name
    path, separator, function = schedule.rpartition(":")
    return f"{PurePath(path).name}:{function}" if separator else schedule


def format_heading(key: str) -> str:
    """Return the heading of a column: the key without unit and underscores, ``num_parameters`` → ``parameters``."""
    name = _OTHER.get(key, key).removeprefix("num_")
    ending = next((ending for ending, _ in _FORMATS if name.endswith(ending)), "")
    name = name if ending in _KEPT else name.removesuffix(ending)
    if ending == "_bytes_per_s" and not name.endswith("bandwidth"):
        name = f"{name}_bandwidth"
    return name.replace("_", " ")


def format_cell(key: str, value: Any) -> str:
    """Return a value as text, in the unit that the ending of ``key`` names; a dash for None."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _format_number(key, value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_cell(key, item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        if key.endswith("ranks"):
            return format_ranges(value)
        return ", ".join(format_cell(key, item) for item in value)
    return str(value)


def format_ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as text in the given order, consecutive numbers as a range: ``0–3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def collapse_rows(cells: list[list[str]], label: int) -> list[list[str]]:
    """Merge neighbouring rows that differ only in the column with index ``label``: ``blocks.0 … blocks.79 ×80``."""
    if not cells:
        return []
    rest = [row[:label] + row[label + 1 :] for row in cells]
    starts = [0, *(i + 1 for i, (before, after) in enumerate(pairwise(rest)) if before != after), len(cells)]
    collapsed = []
    for start, stop in pairwise(starts):
        row = list(cells[start])
        if stop - start > 1:
            row[label] = f"{cells[start][label]} … {cells[stop - 1][label]} ×{stop - start}"
        collapsed.append(row)
    return collapsed


def _format_number(key: str, value: float) -> str:
    for ending, form in _FORMATS:
        if key.endswith(ending):
            return form(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
