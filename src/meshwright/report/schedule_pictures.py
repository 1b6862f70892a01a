"""Draw a schedule as papers do: as SVG (`draw_schedule`), as text (`draw_grid`), as text in slots (`draw_slots`).

One row per rank, one rectangle per computation, time from left to right. In an SVG, the colour shows the kind of
computation, the number the microbatch; later stages of a rank are paler. Pointing at a rectangle shows its name. All
rectangles have numbers or, if those of the shortest computations would not fit, only the long ones. `schedules_table`
compares schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.cells import format_cell, name_schedule_briefly
from meshwright.spec import DocumentError, Opcode, Timeline, format_count, format_seconds, instruction_name, to_seconds
from meshwright.spec.instructions import COMPUTATIONS, INSTRUCTIONS

IDLE_CELL = "."


# ``F3`` is the forward of microbatch 3, ``B3`` its backward (``I3`` and ``W3`` where that is done in two parts), ``O``
# the optimizer, ``S`` a copy of weights that are still needed, a dot idle time. A span from t0 to t1 fills the columns
# round(t0·w/T) to round(t1·w/T) of w; a span shorter than a column may vanish.
def draw_grid(timeline: Timeline, *, width: int = 96, step: int | None = None, scale: str | None = None) -> Text:
    """Return the compute streams of one step as text, one line per rank, and a scale below.

    Args:
        timeline: Predicted or measured.
        width: Columns for the time axis, in addition to the names of ranks.
        step: The step to draw; by default the last one.
        scale: The label of the end of the time axis; by default the length in seconds.

    Raises:
        DocumentError: The timeline lacks the step, or the width is not positive.
    """
    last = int(timeline.step.max(initial=0))
    chosen = last if step is None else step
    if width < 1 or not 0 <= chosen <= last:
        raise DocumentError(
            f"Cannot draw step {chosen} at a width of {width} columns; the timeline has steps 0 to {last} and needs "
            f"at least 1 column."
        )
    computes = np.array([stream.name == "compute" for stream in timeline.tracks], np.bool_)[timeline.track]
    shown = np.flatnonzero(computes & (timeline.step == chosen))
    shown = shown[np.argsort(timeline.start_ps[shown], kind="stable")]
    begin = int(timeline.start_ps[shown].min()) if len(shown) else 0
    length = int(timeline.end_ps[shown].max(initial=begin)) - begin
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track[shown]]
    margin = len(f"rank {timeline.num_ranks - 1} ")
    picture = Text(no_wrap=True, overflow="crop")
    for rank in range(timeline.num_ranks):
        picture.append(f"rank {rank} ".ljust(margin))
        picture.append_text(_draw_rank(timeline, shown[ranks == rank], begin, length, width))
        picture.append("\n")
    end = format_seconds(to_seconds(length)) if scale is None else scale
    picture.append(" " * margin + _scale(end, width), style="dim")
    return picture


def _draw_rank(timeline: Timeline, spans: Iterable[int], begin: int, length: int, width: int) -> Text:
    characters = [IDLE_CELL] * width
    styles: list[tuple[str, int, int]] = []
    for i in map(int, spans):
        opcode = Opcode(int(timeline.opcode[i]))
        row = INSTRUCTIONS[opcode]
        if not row.colour[1] or not length:
            continue
        start, stop = (round((int(edge[i]) - begin) * width / length) for edge in (timeline.start_ps, timeline.end_ps))
        letter, microbatch = row.name[0].upper(), int(timeline.microbatch[i])
        label = f"{letter}{microbatch}" if opcode in COMPUTATIONS else letter
        # Two shades keep neighbouring microbatches apart.
        shade = "bright_" if opcode in COMPUTATIONS and microbatch % 2 else ""
        characters[start:stop] = _fit(label, stop - start)
        styles.append((f"black on {shade}{row.colour[1]}", start, stop))
    line = Text("".join(characters))
    for style, start, stop in styles:
        line.stylize(style, start, stop)
    return line


def _fit(label: str, width: int) -> str:
    """The label in exactly ``width`` columns; its letter alone if the number does not fit."""
    return (label if len(label) <= width else label[:1]).ljust(width)[:width]


def _scale(end: str, width: int) -> str:
    return f"0{end.rjust(width - 1)}" if len(end) < width else end


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
    """Return a table that compares schedules of the same stages, from `planner.schedule_rows`, in 80 columns.

    Microbatches in flight are shown per stage. The column "memory", the memory of the device of the fullest rank, is
    shown if it differs between the schedules.
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
    """Return a timeline of slots as text, wide enough for every number if ``max_width`` columns allow it."""
    slots = int(timeline.end_ps.max(initial=0))
    digits = len(str(int(timeline.microbatch.max(initial=0))))
    widths = [slots * columns for columns in (digits + 2, digits + 1)]
    width = next((width for width in widths if width <= max_width), max_width)
    scale = format_count(slots, "slot")
    return Group(draw_grid(timeline, width=max(width, 1), scale=scale), Text(explain_slots(in_flight)))


def explain_slots(in_flight: Sequence[int]) -> str:
    """Return a sentence on the length of slots, and on the most microbatches in flight of each stage."""
    counts = ", ".join(map(str, in_flight))
    return f"A forward takes 1 slot, a backward 2, transfers none. In flight, by stage: {counts}."


def _counts(numbers: Sequence[int]) -> str:
    if len(numbers) > MAX_STAGES_IN_CELL:
        return f"at most {max(numbers)}"
    return ", ".join(map(str, numbers))


Ids = NDArray[np.intp]

COLOURS = {opcode: row.colour[0] for opcode, row in INSTRUCTIONS.items() if row.colour[0]}
IDLE = "#eceff1"
FONT = "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\""
# A browser shows this many rectangles without delay, and nobody can look at more.
MAX_RECTANGLES = 50_000

_ROW, _BAR, _TOP, _PADDING = 26, 22, 66, 14
# Widths in Helvetica at 12 and 14 pixels: no digit and hardly any letter is wider.
_DIGIT, _LETTER = 7.0, 7.4
_NARROWEST, _WIDEST = 640, 2400
_PALER = (1.0, 0.6, 0.4, 0.3)


def draw_schedule(timeline: Timeline, *, title: str, note: str, scale: str) -> str:
    """Return the compute streams of a timeline as an SVG document.

    Args:
        timeline: Predicted or measured; all of its steps are drawn. Its stages give the shades of a rank.
        title: The first line, and the document's title.
        note: The last line.
        scale: The label of the end of the time axis.

    Raises:
        DocumentError: The timeline has more than `MAX_RECTANGLES` computations.
    """
    computes = np.array([stream.name == "compute" for stream in timeline.tracks], np.bool_)[timeline.track]
    shown = np.flatnonzero(computes & np.isin(timeline.opcode, list(COLOURS)))
    if len(shown) > MAX_RECTANGLES:
        raise DocumentError(
            f"The schedule has {len(shown):,} computations; up to {MAX_RECTANGLES:,} are drawn. Draw a plan with "
            f"fewer microbatches."
        )
    begin = int(timeline.start_ps[shown].min(initial=0)) if len(shown) else 0
    length = max(int(timeline.end_ps[shown].max(initial=begin)) - begin, 1)
    margin = _PADDING + _LETTER * len(f"rank {timeline.num_ranks - 1}") + 8
    width = _chart_width(timeline, shown, length)
    bottom = _TOP + timeline.num_ranks * _ROW
    size = (margin + width + _PADDING, bottom + 52)
    most = int((size[0] - 2 * _PADDING) / _LETTER)
    body = [
        f'<text x="{_PADDING}" y="24" font-weight="bold">{_written(title, most)}</text>',
        *_legend(timeline, shown),
        *_rows(timeline.num_ranks, margin, width),
        *_rectangles(timeline, shown, begin, width / length, margin),
        f'<text x="{margin:.1f}" y="{bottom + 14}" font-size="12">0</text>',
        f'<text x="{margin + width:.1f}" y="{bottom + 14}" font-size="12" text-anchor="end">{_written(scale)}</text>',
        f'<text x="{_PADDING}" y="{bottom + 38}">{_written(note, most)}</text>',
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]}" width="{size[0]:.0f}" '
        f'height="{size[1]}" role="img" {FONT} font-size="14" fill="#1c232a" style="background:#ffffff">'
        f"<title>{_written(title)}</title>"
    )
    return "\n".join((head, *body, "</svg>", ""))


def _chart_width(timeline: Timeline, shown: Ids, length: int) -> float:
    """Wide enough for a number in the shortest computation, within limits."""
    spans = timeline.end_ps[shown] - timeline.start_ps[shown]
    shortest = int(spans[spans > 0].min(initial=length))
    digits = len(str(int(timeline.microbatch.max(initial=0))))
    return float(np.clip(length / shortest * (_DIGIT * digits + 5), _NARROWEST, _WIDEST))


def _legend(timeline: Timeline, shown: Ids) -> Iterator[str]:
    """A dot for each kind of computation in the timeline."""
    x = float(_PADDING)
    for opcode in (opcode for opcode in COLOURS if opcode in timeline.opcode[shown]):
        yield f'<circle cx="{x + 7:.1f}" cy="45" r="7" fill="{COLOURS[opcode]}"/>'
        yield f'<text x="{x + 20:.1f}" y="50">{INSTRUCTIONS[opcode].label}</text>'
        x += 20 + _LETTER * len(INSTRUCTIONS[opcode].label) + 18
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track[shown]]
    if len(np.unique(np.stack([ranks, timeline.stage[shown]]), axis=1).T) > len(np.unique(ranks)):
        yield f'<text x="{x:.1f}" y="50">paler: later stages of a rank</text>'


def _rows(num_ranks: int, margin: float, width: float) -> Iterator[str]:
    """Names of ranks, and a grey line in each row for the time in which nothing is computed."""
    for rank in range(num_ranks):
        y = _TOP + rank * _ROW
        yield f'<text x="{margin - 8:.1f}" y="{y + 16}" text-anchor="end">rank {rank}</text>'
        middle = y + _BAR // 2
        yield f'<path d="M{margin:.1f} {middle}h{width:.1f}" stroke="{IDLE}" stroke-width="{_BAR}"/>'


def _rectangles(timeline: Timeline, shown: Ids, begin: int, scale: float, margin: float) -> Iterator[str]:
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track]
    stages = {rank: sorted(set(timeline.stage[shown][ranks[shown] == rank].tolist())) for rank in set(ranks[shown])}
    narrow = _DIGIT * len(str(int(timeline.microbatch.max(initial=0))))
    for i in map(int, shown):
        opcode, rank = Opcode(int(timeline.opcode[i])), int(ranks[i])
        stage, microbatch = int(timeline.stage[i]), int(timeline.microbatch[i])
        x = margin + (int(timeline.start_ps[i]) - begin) * scale
        wide = (int(timeline.end_ps[i]) - int(timeline.start_ps[i])) * scale
        y = _TOP + rank * _ROW
        shade = _PALER[min(stages[rank].index(stage), len(_PALER) - 1)]
        paler = f' fill-opacity="{shade:g}"' if shade < 1 else ""
        name = instruction_name(opcode, stage, microbatch, -1)
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" fill="{COLOURS[opcode]}"{paler} '
            f'stroke="#ffffff" stroke-width="0.7"><title>{name}</title></rect>'
        )
        if microbatch >= 0 and wide >= narrow:
            yield (
                f'<text x="{x + wide / 2:.1f}" y="{y + 15}" text-anchor="middle" font-size="12" '
                f'pointer-events="none">{microbatch}</text>'
            )


def _written(text: str, most: int = 2**31) -> str:
    """Text of at most ``most`` letters, escaped for the document."""
    fitting = text if len(text) <= most else f"{text[: most - 1]}…"
    return escape("".join(letter if letter.isprintable() else "?" for letter in fitting))
