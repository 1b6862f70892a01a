"""A schedule drawn as text, as papers draw it: what each rank computes, and when.

One line per rank, time from left to right, of the compute stream: ``F3`` is the forward of microbatch 3, ``B3`` its
backward (``I3`` and ``W3`` where that is done in two parts), ``O`` the optimizer, ``S`` a copy of weights that are
still needed, a dot idle time. A span from t0 to t1 fills the columns round(t0·w/T) to round(t1·w/T) of w; a span
shorter than a column may vanish.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.text import Text

from meshwright.spec import DocumentError, Opcode, Timeline, format_seconds, to_seconds
from meshwright.spec.instructions import COMPUTATIONS, INSTRUCTIONS

IDLE = "."


def draw_grid(timeline: Timeline, *, width: int = 96, step: int | None = None, scale: str | None = None) -> Text:
    """The compute streams of one step, one line per rank, and a scale below.

    Args:
        timeline: Predicted or measured.
        width: Columns for the time axis, in addition to the names of ranks.
        step: The step to draw; by default the last one.
        scale: What the whole width stands for; by default its seconds.

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
    characters = [IDLE] * width
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
