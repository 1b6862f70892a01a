"""Draws docs/images/collectives.svg: collectives of a cluster that was never profiled, predicted and measured.

    python docs/pictures/collectives.py

Fitted on two nodes of eight V100, drawn for four: the whole cluster, and every second, fourth and eighth device. Needs
``meshwright[validate]``; a test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from math import log2
from pathlib import Path

import numpy as np
from drawing import WIDTH, picture

from meshwright.cost.collectives import CollectiveGroup, CollectiveModel, CollectiveOp, fit_collectives
from meshwright.cost.collectives.fitting import groups_of
from meshwright.records import Records
from meshwright.spec import write_text
from meshwright.validation import load_records

PICTURE = Path(__file__).resolve().parent.parent / "images" / "collectives.svg"
PANELS: tuple[tuple[CollectiveOp, str], ...] = (("all_reduce", "all-reduce"), ("all_to_all", "all-to-all"))
# Groups per NIC, what they are, and their colour.
PLACES = ((1, "32 devices", "#2f6db3"), (2, "16, every second", "#3f8f5b"), (4, "8, every fourth", "#c8731a"))
SIZES = 2.0 ** np.arange(16, 33)
LEFT, TOP, PANEL, HEIGHT = 70.0, 40.0, 400.0, 320.0
SHORTEST, LONGEST = -11.0, 4.0  # log₂ of seconds


def draw() -> str:
    """The picture as SVG."""
    rows = load_records("v100")
    rows = rows.select(rows.op != "matmul")
    eights = rows.select(rows.size("devices_per_node") == 8)
    model = fit_collectives(eights.select(eights.size("nodes") == 2))
    scored = eights.select((eights.size("nodes") == 4) & ~eights.has_flag("noop"))
    body = []
    for number, (_, words, colour) in enumerate(PLACES):
        x = LEFT + number * 170
        body.append(f'<line x1="{x:g}" x2="{x + 22:g}" y1="20" y2="20" stroke="{colour}" stroke-width="2"/>')
        body.append(f'<text x="{x + 28:g}" y="24">{words}</text>')
    body.append(f'<text x="{WIDTH - 20}" y="24" text-anchor="end">lines: predicted, bands: 80 %; dots: measured</text>')
    for number, (op, words) in enumerate(PANELS):
        body += _panel(op, words, LEFT + number * (PANEL + 60), model, scored.where(op=op))
    return picture("Four nodes of eight V100, predicted from two", body, TOP + HEIGHT + 40)


def _panel(op: CollectiveOp, words: str, left: float, model: CollectiveModel, rows: Records) -> list[str]:
    body = [
        f'<rect x="{left:g}" y="{TOP:g}" width="{PANEL:g}" height="{HEIGHT:g}" fill="none" stroke="#b0b7bd"/>',
        f'<text x="{left + 8:g}" y="{TOP + 18:g}" font-weight="bold">{words}</text>',
    ]
    for power, label in ((16, "64 KiB"), (20, "1 MiB"), (24, "16 MiB"), (28, "256 MiB"), (32, "4 GiB")):
        x = _x(left, 2.0**power)
        body.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18:g}" text-anchor="middle">{label}</text>')
    for seconds, label in ((1e-3, "1 ms"), (1e-2, "10 ms"), (1e-1, "100 ms"), (1.0, "1 s")):
        y = _y(seconds)
        body.append(f'<line x1="{left:g}" x2="{left + PANEL:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceff1"/>')
        body.append(f'<text x="{left - 6:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    groups = groups_of(rows)
    for sharing, _, colour in PLACES:
        group = CollectiveGroup(num_ranks=32 // sharing, num_nodes=4, num_sharing=sharing)
        found = model.predict(op, group, SIZES)
        if found is None:
            continue
        band = [*zip(SIZES, found.low_s, strict=True), *zip(SIZES[::-1], found.high_s[::-1], strict=True)]
        body.append(f'<polygon points="{_path(left, band)}" fill="{colour}" fill-opacity="0.12"/>')
        line = _path(left, list(zip(SIZES, found.seconds, strict=True)))
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        mine = rows.select(np.array([place == group for place in groups]))
        for size, seconds, raised in zip(mine.size("bytes"), mine.seconds, mine.has_flag("plateau"), strict=True):
            if size >= SIZES[0] and not raised:
                x, y = _x(left, size), _y(seconds)
                body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>')
    return body


def _path(left: float, points: list[tuple[float, float]]) -> str:
    return " ".join(f"{_x(left, size):.1f},{_y(seconds):.1f}" for size, seconds in points)


def _x(left: float, size: float) -> float:
    return left + (log2(size) - 16) / 16 * PANEL


def _y(seconds: float) -> float:
    return TOP + HEIGHT * (1 - (log2(seconds) - SHORTEST) / (LONGEST - SHORTEST))


if __name__ == "__main__":
    write_text(draw(), PICTURE)
