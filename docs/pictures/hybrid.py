"""Draws docs/images/hybrid.svg: which replicas shard states among each other, and which sum, with a shard size.

    python docs/pictures/hybrid.py

A test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from pathlib import Path

from drawing import picture

from meshwright.spec import GradientExchange, write_text

PICTURE = Path(__file__).resolve().parent.parent / "images" / "hybrid.svg"
RANKS = tuple(range(8))
COLOURS = ("#2f6db3", "#3f8f5b", "#c8731a", "#8a5aa8")
LEFT, TOP, SIZE, GAP, DOWN = 190.0, 50.0, 110.0, 60.0, 190.0


def draw() -> str:
    """The picture as SVG."""
    exchange = GradientExchange(zero=3, shard_size=4)
    groups, across = exchange.shard_groups(RANKS), exchange.replicating_groups(RANKS)
    place = {rank: (row, column) for row, ranks in enumerate(groups) for column, rank in enumerate(ranks)}
    body = []
    for row, ranks in enumerate(groups):
        y = TOP + row * DOWN
        width = len(ranks) * SIZE + (len(ranks) - 1) * GAP
        body.append(
            f'<rect x="{LEFT - 20:g}" y="{y - 24:g}" width="{width + 78:g}" height="{SIZE + 44:g}" rx="6" '
            'fill="#f4f6f8" stroke="#b0b7bd"/>'
        )
        body.append(f'<text x="{LEFT - 30:g}" y="{y + SIZE / 2:g}" text-anchor="end">node {row}</text>')
        body.append(
            f'<text x="{LEFT + width / 2:g}" y="{y - 8:g}" text-anchor="middle">one group: parameters gathered, '
            "gradients scattered, in every microbatch</text>"
        )
        body += _devices(ranks, place)
    for column, ranks in enumerate(across):
        x = _x(column) + SIZE / 2
        top, bottom = TOP + SIZE + 4, TOP + (len(ranks) - 1) * DOWN - 26
        body.append(
            f'<line x1="{x:g}" x2="{x:g}" y1="{top:g}" y2="{bottom:g}" stroke="{COLOURS[column]}" stroke-width="4"/>'
        )
    middle = TOP + SIZE + (DOWN - SIZE) / 2 + 2
    body.append(f'<text x="{LEFT - 30:g}" y="{middle:g}" text-anchor="end">summed once per step</text>')
    return picture("ZeRO 3 with a shard size of 4, on two nodes", body, TOP + (len(groups) - 1) * DOWN + SIZE + 40)


def _devices(ranks: tuple[int, ...], place: dict[int, tuple[int, int]]) -> list[str]:
    """Each device with the parts of the states, of which it keeps its own."""
    body = []
    for rank in ranks:
        row, own = place[rank]
        x, y, height = _x(own), TOP + row * DOWN, SIZE / len(ranks)
        for part in range(len(ranks)):
            fill = COLOURS[part] if part == own else "#ffffff"
            body.append(
                f'<rect x="{x:g}" y="{y + part * height:g}" width="{SIZE:g}" height="{height:g}" fill="{fill}" '
                'stroke="#90999f"/>'
            )
        white = y + own * height + height / 2 + 4
        body.append(
            f'<text x="{x + SIZE / 2:g}" y="{white:g}" text-anchor="middle" fill="#ffffff">part {own} of 4</text>'
        )
        body.append(f'<text x="{x + SIZE + 4:g}" y="{y + 12:g}">rank {rank}</text>')
    return body


def _x(column: int) -> float:
    return LEFT + column * (SIZE + GAP)


if __name__ == "__main__":
    write_text(draw(), PICTURE)
