"""Show whether a plan fits in memory: as a table of its ranks (`fit_table`), and in a sentence (`verdict`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.cells import format_ranges
from meshwright.spec import format_bytes, format_count
from meshwright.spec.memory import MEMORY_GROUPS, group_parts

Row = dict[str, Any]

# Headings where the group's own name is too wide for 80 columns.
_HEADINGS = {"parameters": "params"}


# Equal ranks share one row. The parts of a peak are summed by the groups of `meshwright.spec.memory`, which add up to
# it.
def fit_table(rows: Sequence[Row], note: str = "") -> RenderableType:
    """Return the verdict and a table of every rank's peak memory, from `RankedPlan.memory_rows`, in 80 columns.

    Beside the peak, the table shows each rank's limit if limits differ; else the bytes that the allocator reserves for
    the peak; else (without an allocator) the bytes left. ``note`` is printed below the verdict.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    groups = (_HEADINGS.get(group, group) for group in MEMORY_GROUPS)
    beside = "reserved" if any(row["reserved_bytes"] != row["peak_bytes"] for row in rows) else "headroom"
    if len({row["limit_bytes"] for row in rows}) > 1:
        beside = "limit"
    for heading in ("rank", "stage", "peak", beside, *groups):
        names = heading == "rank"
        table.add_column(heading, justify="left" if names else "right", no_wrap=not names, overflow="fold")
    for row, ranks in _alike(rows):
        style = "" if row["fits"] else "bold red"
        table.add_row(
            _name_ranks(ranks),
            ", ".join(map(str, row["stages"])),
            format_bytes(row["peak_bytes"]),
            _signed(row[f"{beside}_bytes"]),
            *(format_bytes(num_bytes) for num_bytes in group_parts(row["parts_bytes"]).values()),
            style=style,
        )
    return Group(Text(verdict(rows)), *([Text(note)] if note else []), table)


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence: whether all ranks fit, and the rank that has the least memory left or exceeds it most."""
    tightest = min(rows, key=lambda row: row["headroom_bytes"])
    over = sum(not row["fits"] for row in rows)
    ranks, limit = format_count(len(rows), "rank"), format_bytes(tightest["limit_bytes"])
    holds = "reserves" if tightest["reserved_bytes"] != tightest["peak_bytes"] else "needs"
    held = f"{holds} {format_bytes(tightest['reserved_bytes'])}"
    if over:
        return (
            f"Does not fit: {over} of {ranks} over; rank {tightest['rank']} {held}, "
            f"{format_bytes(-tightest['headroom_bytes'])} more than the {limit} allowed."
        )
    return f"Fits: {ranks}; rank {tightest['rank']} has the least to spare: it {held} of the {limit} allowed."


def _alike(rows: Sequence[Row]) -> list[tuple[Row, list[int]]]:
    """Rows that are equal except for the rank, with their ranks; in the order of their first ranks."""
    groups: dict[tuple[object, ...], tuple[Row, list[int]]] = {}
    for row in rows:
        key = (*row["stages"], row["limit_bytes"], *row["parts_bytes"].items())
        groups.setdefault(key, (row, []))[1].append(row["rank"])
    return list(groups.values())


def _name_ranks(ranks: Sequence[int]) -> str:
    """Runs are shortened; ranks with equal steps, such as replicas of a stage, by their first two and their last."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
    return format_ranges(ranks)


def _signed(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes >= 0 else f"−{format_bytes(-num_bytes)}"
