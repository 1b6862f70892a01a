"""Draw the results of a sweep as curves, in SVG (`draw_curves`).

One figure of all cases is drawn over their first parameter, with a curve for each combination of the other parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Any

from meshwright.report.cells import format_cell, format_heading
from meshwright.spec.units import Bytes, BytesPerSecond, Seconds

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 210, 44, 60
# Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c00")
# Dash patterns, one for each round of the colours.
DASHES = ("", "7 4", "2 3")
# Names in one row of the legend.
MOST_CURVES = 20
# From this ratio of the largest to the smallest value on, an axis is logarithmic; up to this one, it does not start at
# zero.
_LOG_FROM, _CLOSE = 20.0, 1.3
# The smallest seconds for each unit of a time axis.
_TIMES = (
    (2 * 86400.0, 86400.0, "d"),
    (2 * 3600.0, 3600.0, "h"),
    (120.0, 60.0, "min"),
    (1.0, 1.0, "s"),
    (1e-3, 1e-3, "ms"),
    (1e-6, 1e-6, "µs"),
)
_UNIT = re.compile(r"([0-9.eE+-]+)\s*(\S.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Positions of values, between 0 and 1; ``ticks`` are (position, text)."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        if self.is_log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def draw_curves(rows: Sequence[dict[str, Any]], parameters: Sequence[str], figure: str, *, title: str = "") -> str:
    """Return an SVG of the column ``figure`` over the first parameter; rows without a number there are left out.

    The plot is empty if no row has a number. At most `MOST_CURVES` curves are drawn, the first ones; a line states the
    number of the others.
    """
    rows = [row for row in rows if isinstance(row.get(figure), int | float)]
    first, others = parameters[0], parameters[1:]
    numbers, unit = _as_numbers([row[first] for row in rows])
    labels = list(dict.fromkeys(str(row[first]) for row in rows))
    across = _axis(numbers, spread=False) if numbers else _Axis(low=-0.5, high=len(labels) - 0.5, is_log=False)
    heights = [float(row[figure]) for row in rows]
    up = _axis(heights, spread=True)
    shown = _heights(figure, up)
    curves: dict[str, list[tuple[float, float]]] = {}
    for place, row in enumerate(rows):
        name = ", ".join(f"{_short(other)} {_text(row[other])}" for other in others)
        x = numbers[place] if numbers else float(labels.index(str(row[first])))
        curves.setdefault(name, []).append((across.place(x), up.place(heights[place])))
    left_out = len(curves) - MOST_CURVES
    curves = dict(list(curves.items())[:MOST_CURVES])
    marks = (
        [(value, _plain(value)) for value in _ticks(across, sorted(set(numbers)))]
        if numbers
        else [(float(index), label) for index, label in enumerate(labels)]
    )
    body = [
        *_grid(
            [(across.place(value), text) for value, text in marks],
            shown,
        ),
        *(_curve(points, index) for index, points in enumerate(curves.values())),
        *(_legend(name, index) for index, name in enumerate(curves) if name),
        _words(WIDTH - RIGHT + 16, _line(MOST_CURVES) + 4, f"and {left_out} more, not drawn", 'font-size="12"')
        if left_out > 0
        else "",
        _words(LEFT, 24, title, 'font-weight="bold"'),
        _words(LEFT + _span() / 2, HEIGHT - 14, f"{first}{f', {unit}' if unit else ''}", 'text-anchor="middle"'),
        _words(12, TOP - 12, format_heading(figure), 'font-size="12"') if not title else "",
    ]
    if title:
        body.append(_words(WIDTH - 16, 24, format_heading(figure), 'text-anchor="end"'))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="13" fill="#1c232a">'
        f'<title>{escape(title or figure)}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    )
    return "\n".join((head, *filter(None, body), "</svg>", ""))


def _as_numbers(values: Sequence[Any]) -> tuple[list[float], str]:
    """Values that are numbers, or numbers with units, in the unit of the first; [] if they are neither."""
    if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values], ""
    found = [_UNIT.fullmatch(value) if isinstance(value, str) else None for value in values]
    units = {match[2] for match in found if match}
    if not values or not all(found):
        return [], ""
    first = found[0][2] if found[0] else ""
    if len(units) != 1:
        for quantity in (Seconds, Bytes, BytesPerSecond):
            with suppress(ValueError):
                return [quantity.decode_scalar(value) / quantity.UNITS[first] for value in values], first
        return [], ""
    try:
        return [float(match[1]) for match in found if match], units.pop()
    except ValueError:
        return [], ""


def _axis(values: Sequence[float], *, spread: bool) -> _Axis:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high / low >= _LOG_FROM:
        return _Axis(low=low, high=high, is_log=True)
    if spread and 0 < low < high <= _CLOSE * low:
        # On an axis from zero, such close curves would overlap.
        low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    elif spread:
        # A time axis starts at zero, so that heights are proportional to times.
        low, high = min(low, 0.0), high * 1.06 if high > 0 else 1.0
    return _Axis(low=low, high=high, is_log=False) if high > low else _Axis(low=low - 0.5, high=low + 0.5, is_log=False)


def _heights(figure: str, axis: _Axis) -> list[tuple[float, str]]:
    """Positions of round numbers and their texts: times in one unit, all else as in tables if the texts differ."""
    if figure.endswith("_s") and not figure.endswith("_per_s"):
        size, unit = next((row[1:] for row in _TIMES if row[0] <= axis.high), _TIMES[-1][1:])
        scaled = _Axis(low=axis.low / size, high=axis.high / size, is_log=axis.is_log)
        return [(scaled.place(value), f"{_plain(value)} {unit}") for value in _ticks(scaled, None)]
    ticks = _ticks(axis, None)
    texts = [format_cell(figure, value) for value in ticks]
    if len(set(texts)) < len(texts):
        texts = [_plain(value) for value in ticks]
    return [(axis.place(value), text) for value, text in zip(ticks, texts, strict=True)]


def _plain(value: float) -> str:
    """A number with all digits of its tick, without an exponent if it is readable."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _ticks(axis: _Axis, values: Sequence[float] | None) -> list[float]:
    """The values themselves if they are few, else round numbers."""
    if values is not None and len(values) <= 10:
        return list(values)
    if axis.is_log:
        first, last = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
        found = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
        return [value for value in found if axis.low <= value <= axis.high]
    size = 10.0 ** math.floor(math.log10((axis.high - axis.low) / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * 6 >= axis.high - axis.low)
    count = math.floor(axis.high / step) - math.ceil(axis.low / step) + 1
    return [(math.ceil(axis.low / step) + k) * step for k in range(count)]


def _span() -> float:
    return WIDTH - LEFT - RIGHT


def _x(place: float) -> float:
    return LEFT + place * _span()


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def _grid(across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]]) -> list[str]:
    lines = []
    for place, text in up:
        y = _y(place)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dfe3e8"/>')
        lines.append(_words(LEFT - 8, y + 4, text, 'text-anchor="end" font-size="12"'))
    for place, text in across:
        lines.append(f'<path d="M{_x(place):.1f} {HEIGHT - BOTTOM}v5" stroke="#5b6670"/>')
        lines.append(_words(_x(place), HEIGHT - BOTTOM + 20, text, 'text-anchor="middle" font-size="12"'))
    lines.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#5b6670"/>')
    return lines


def _curve(points: Sequence[tuple[float, float]], index: int) -> str:
    colour, dashes = _style(index)
    placed = [(_x(x), _y(y)) for x, y in sorted(points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>{dots}'


def _style(index: int) -> tuple[str, str]:
    """The colour and dash pattern of a curve; no two drawn curves have both in common."""
    dashes = DASHES[index // len(COLOURS)]
    return COLOURS[index % len(COLOURS)], f' stroke-dasharray="{dashes}"' if dashes else ""


def _line(index: int) -> int:
    """The vertical position of a line of the legend."""
    return TOP + 8 + 20 * index


def _legend(name: str, index: int) -> str:
    x, y = WIDTH - RIGHT + 16, _line(index)
    colour, dashes = _style(index)
    words = _words(x + 24, y + 4, name, 'font-size="12"')
    return f'<path d="M{x} {y}h18" stroke="{colour}" stroke-width="3"{dashes}/>{words}'


def _short(parameter: str) -> str:
    """The last part of a name, as words."""
    return parameter.rpartition(".")[2].removeprefix("num_").replace("_", " ")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _words(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
