"""Draws docs/images/experts.svg: the choices of a router on two ranks, on their way to four experts.

    python docs/pictures/experts.py

A test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

import random
from pathlib import Path

from drawing import WIDTH, picture

from meshwright.spec import write_text

PICTURE = Path(__file__).resolve().parent.parent / "images" / "experts.svg"
RANKS, EXPERTS, TOKENS, CHOSEN = 2, 4, 7, 2
COLOURS = ("#7fa8d9", "#8cc59c", "#e8b48f", "#c9b8e8")
LEFT, TOP, CELL, STEP, APART = 190, 46, 24, 46, 408
ROWS = (
    ("as the router chose", "rank by rank, in the order of the tokens"),
    ("sorted by expert", "what each rank sends"),
    ("dispatched", "what arrives, rank by rank"),
    ("by expert", "what grouped products multiply"),
    ("combined", "home, in the order in which they were sent"),
)


def draw() -> str:
    """The picture as SVG."""
    chance = random.Random(3)
    # (token, expert) of each choice.
    chosen = [
        [(token, expert) for token in range(TOKENS) for expert in chance.sample(range(EXPERTS), CHOSEN)]
        for _ in range(RANKS)
    ]
    here = EXPERTS // RANKS
    by_expert = [sorted(choices, key=lambda choice: choice[1]) for choices in chosen]
    arrived = [
        [(token, expert) for choices in by_expert for token, expert in choices if expert // here == rank]
        for rank in range(RANKS)
    ]
    grouped = [sorted(choices, key=lambda choice: choice[1]) for choices in arrived]
    body = []
    for rank in range(RANKS):
        has = " and ".join(str(rank * here + index) for index in range(here))
        x = LEFT + rank * APART
        body.append(f'<text x="{x}" y="{TOP - 16}" font-weight="bold">rank {rank}: experts {has}</text>')
    for number, ((title, words), choices) in enumerate(
        zip(ROWS, (chosen, by_expert, arrived, grouped, by_expert), strict=True)
    ):
        y = TOP + number * STEP
        body.append(f'<text x="14" y="{y + 11}" font-weight="bold">{title}</text>')
        body += [
            f'<text x="14" y="{y + 22 + 11 * line}" font-size="10">{text}</text>'
            for line, text in enumerate(words.split(", "))
        ]
        for rank in range(RANKS):
            body += _cells(LEFT + rank * APART, y, choices[rank])
    return picture("Choices of two ranks on their way to four experts", body, TOP + len(ROWS) * STEP + 8)


def _cells(left: int, y: int, choices: list[tuple[int, int]]) -> list[str]:
    body = []
    for place, (token, expert) in enumerate(choices):
        x = left + place * CELL
        body.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{COLOURS[expert]}" rx="2"/>'
            f'<text x="{x + CELL / 2 - 1:g}" y="{y + 15}" text-anchor="middle" font-size="11">{token}</text>'
        )
    return body


if __name__ == "__main__":
    assert LEFT + (RANKS - 1) * APART < WIDTH
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
