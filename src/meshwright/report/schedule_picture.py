"""A schedule as papers draw it, as SVG: one row per rank, one rectangle per computation, time from left to right.

The colour shows the kind of computation, the number the microbatch; later stages of a rank are paler. Pointing at a
rectangle shows its name. All rectangles have numbers or, if those of the shortest computations would not fit, only the
long ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import DocumentError, Opcode, Timeline, instruction_name
from meshwright.spec.instructions import INSTRUCTIONS

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
    """The compute streams of a timeline as an SVG document.

    Args:
        timeline: Predicted or measured; all of its steps are drawn. Its stages give the shades of a rank.
        title: The first line, and the document's title.
        note: The last line.
        scale: What the whole width stands for.

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
