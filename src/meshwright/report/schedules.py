"""A table that compares schedules, and one schedule drawn in slots, as papers draw it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.cells import format_cell, name_schedule_briefly
from meshwright.report.grid import draw_grid
from meshwright.spec import Timeline, format_count

_COLUMNS = (
    ("schedule", "schedule"),
    ("step", "step_s"),
    ("bubble", "bubble_share"),
    ("in flight", "in_flight"),
    ("activations", "activations_bytes"),
    ("peak", "peak_bytes"),
    ("memory", "limit_bytes"),
    ("fits", "fits"),
)

# For more stages, only the largest count is shown.
MAX_STAGES_IN_CELL = 4


def schedules_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Schedules of the same stages, from `planner.schedule_rows`, in 80 columns.

    In-flight microbatches are shown per stage. The memory of the fullest rank's device is shown if it differs between
    the schedules.
    """
    equal = len({row["limit_bytes"] for row in rows}) == 1
    columns = [column for column in _COLUMNS if not (equal and column[1] == "limit_bytes")]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading, key in columns:
        table.add_column(heading, justify="left" if key in ("schedule", "in_flight") else "right", no_wrap=True)
    for row in rows:
        shown = {
            **row,
            "schedule": name_schedule_briefly(row["schedule"]),
            "in_flight": _counts(row["in_flight"]),
        }
        table.add_row(*(Text(format_cell(key, shown[key])) for _, key in columns))
    return table


def draw_slots(timeline: Timeline, in_flight: Sequence[int], *, max_width: int) -> RenderableType:
    """A timeline whose times are slots, wide enough for every number if ``max_width`` columns allow it."""
    slots = int(timeline.end_ps.max(initial=0))
    digits = len(str(int(timeline.microbatch.max(initial=0))))
    widths = [slots * columns for columns in (digits + 2, digits + 1)]
    width = next((width for width in widths if width <= max_width), max_width)
    scale = format_count(slots, "slot")
    return Group(draw_grid(timeline, width=max(width, 1), scale=scale), Text(explain_slots(in_flight)))


def explain_slots(in_flight: Sequence[int]) -> str:
    """The meaning of slots, and the most microbatches that each stage holds."""
    counts = ", ".join(map(str, in_flight))
    return f"A forward takes 1 slot, a backward 2, transfers none. In flight, by stage: {counts}."


def _counts(numbers: Sequence[int]) -> str:
    if len(numbers) > MAX_STAGES_IN_CELL:
        return f"at most {max(numbers)}"
    return ", ".join(map(str, numbers))
