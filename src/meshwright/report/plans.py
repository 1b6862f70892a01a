"""Ranked plans as a table: how they differ, how fast each is and how sure that is, memory, bubble, money.

A layout is written as in the field: data-parallel replicas (dp), pipeline stages (pp), axes of sharding (tp, cp, ep),
ZeRO stage, samples of a microbatch (mbs). Properties that all rows share are stated once, above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.report.cells import NOTHING, format_cell, name_schedule_briefly
from meshwright.report.narrow import NarrowTable
from meshwright.spec import format_money, format_percent, format_seconds

Row = dict[str, Any]
Cell = Callable[[Row], str]


def plans_table(rows: Sequence[Row]) -> RenderableType:
    """The planner's rows (`Plans.rows`), best first; at 80 columns, columns that do not fit move to a table below."""
    columns: list[tuple[str, Cell]] = [("#", lambda row: str(row["place"]))]
    alike = []
    for heading, usual, cell in _LAYOUT:
        values = {cell(row) for row in rows}
        if len(values) > 1 or heading in _ALWAYS:
            columns.append((heading, cell))
        elif (value := values.pop()) != usual and heading != "devices":
            alike.append(f"{heading.replace('sched.', 'schedule')} {value}")
    columns += [(heading, cell) for heading, cell in _figures(rows)]
    headings = [heading for heading, _ in columns]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    numeric = [heading not in _WORDS for heading in headings]
    table = NarrowTable(headings, cells, numeric=numeric, close=True)
    return Group(Text(f"All plans: {', '.join(alike)}."), table) if alike else table


def _figures(rows: Sequence[Row]) -> list[tuple[str, Cell]]:
    """Speed, memory and price of plans; a column without any value is left out."""
    columns: list[tuple[str, Cell]] = [("step", lambda row: format_seconds(row["step_time_s"]))]
    if any(row["step_interval_s"] for row in rows):
        columns.append(("80 %", _interval))
    if any("makespan_s" in row for row in rows):
        columns.append(("batch alone", lambda row: format_cell("makespan_s", row.get("makespan_s"))))
    if any(row["tokens_per_s"] is not None for row in rows):
        columns.append(("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"))
    else:
        columns.append(("samples/s", lambda row: format_cell("samples_per_s", row["samples_per_s"])))
    if any(row["mfu_share"] is not None for row in rows):
        columns.append(("MFU", lambda row: _percent(row["mfu_share"])))
    columns += [
        ("memory", lambda row: format_cell("reserved_memory_bytes", row["reserved_memory_bytes"])),
        ("bubble", lambda row: _percent(row["bubble_share"])),
    ]
    priced = next((row for row in rows if "currency" in row), None)
    if priced is not None:
        key, what = ("price_per_million_samples", "samples")
        if "price_per_million_tokens" in priced:
            key, what = ("price_per_million_tokens", "tokens")
        columns.append((f"{priced['currency']}/M {what}", lambda row: format_money(row[key])))
    return columns


def _replicas(row: Row) -> str:
    """The number of replicas if all stages have the same, else the numbers, equal neighbours merged: ``1, 3 ×5``."""
    runs = [(count, len(list(same))) for count, same in groupby(row["replicas"])]
    if len(runs) == 1:
        return str(runs[0][0])
    return ", ".join(f"{count} ×{length}" if length > 1 else str(count) for count, length in runs)


def _tensor(row: Row) -> str:
    return f"{row['tensor']}{'+sp' * row['sequence_parallel']}{' own' * row['has_own_placements']}"


def _interval(row: Row) -> str:
    if row["step_interval_s"] is None:
        return NOTHING
    (low, low_unit), (high, high_unit) = (format_seconds(value).split(" ") for value in row["step_interval_s"])
    unit = format_seconds(row["step_time_s"]).split(" ")[1]
    if low_unit == high_unit:
        return f"{low}–{high}" if high_unit == unit else f"{low}–{high} {high_unit}"
    return f"{low} {low_unit}–{high} {high_unit}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else format_percent(share, 0)


# Heading, the default that is not shown, and the cell.
def _schedule(row: Row) -> str:
    name, each = name_schedule_briefly(row["schedule"]), row["num_stages"] // row["num_positions"]
    return f"{name} ×{each}" if each > 1 else name


_LAYOUT: tuple[tuple[str, str, Cell], ...] = (
    ("devices", "", lambda row: str(row["num_devices"])),
    ("dp", "", _replicas),
    ("pp", "", lambda row: str(row["num_positions"])),
    ("tp", "1", _tensor),
    ("cp", "1", lambda row: str(row["context"])),
    ("ep", "1", lambda row: str(row["expert"])),
    ("zero", "0", lambda row: str(row["zero"])),
    ("shard", "0", lambda row: str(row["shard_size"])),
    ("mbs", "", lambda row: str(row["microbatch_size"])),
    ("sched.", "", _schedule),
    ("recompute", "none", lambda row: row["recompute"]),
    ("offload", "none", lambda row: row["offload"].replace("optimizer states", "states").replace(" on the host", "")),
)
_ALWAYS = ("dp", "pp", "mbs")
_WORDS = ("sched.", "recompute", "offload", "tp")
