"""Draws docs/images/more_schedules.svg: zero-bubble, virtual and bidirectional pipelines, as the simulator times them.

    python docs/pictures/more_schedules.py

Eight equal layers on four ranks, eight microbatches; a layer's forward takes one second, the gradient of its input one
and that of its weight one; transfers take next to nothing. A test (tests/docs/test_pictures.py) runs this and compares
with the file, so the picture is what the code does.
"""

from __future__ import annotations

from pathlib import Path

from drawing import COLOURS, IDLE, Panel, legend, simulate, stack

from meshwright.spec import Opcode, write_text

PICTURE = Path(__file__).resolve().parent.parent / "images" / "more_schedules.svg"
PIXELS_PER_S = 12.6
FOUR = [(2, (rank,)) for rank in range(4)]
IN_TURN = [(1, (stage % 4,)) for stage in range(8)]
THERE_AND_BACK = [(1, (min(stage, 7 - stage),)) for stage in range(8)]
BOTH_WAYS = [(2, (rank, 3 - rank)) for rank in range(4)]
PANELS = (
    ("1f1b, to compare with", FOUR, "1f1b"),
    ("zb-h1: gradients of weights fill what 1f1b leaves idle", FOUR, "zb-h1"),
    ("zb-h2: more microbatches in flight, and no rank waits once it began", FOUR, "zb-h2"),
    ("interleaved: stages i and i + 4 on rank i", IN_TURN, "interleaved"),
    ("looped-bfs: the same stages, all microbatches through one after the other", IN_TURN, "looped-bfs"),
    ("zb-v: stages i and 7 − i on rank i", THERE_AND_BACK, "zb-v"),
    ("dualpipe-v: the same stages, a forward and a backward together", THERE_AND_BACK, "dualpipe-v"),
    ("dualpipe: two replicas of every stage, microbatches from both ends", BOTH_WAYS, "dualpipe"),
)
LEGEND = legend(
    (COLOURS[Opcode.FORWARD], "forward"),
    (COLOURS[Opcode.BACKWARD], "whole backward"),
    (COLOURS[Opcode.BACKWARD_INPUT], "gradients of inputs"),
    (COLOURS[Opcode.BACKWARD_WEIGHT], "gradients of weights"),
    (IDLE, "idle"),
)


def draw() -> str:
    """The whole picture as SVG."""
    panels = [
        Panel(title=title, result=simulate(stages, schedule), pixels_per_s=PIXELS_PER_S)
        for title, stages, schedule in PANELS
    ]
    return stack("Zero-bubble, virtual and bidirectional pipelines", LEGEND, panels)


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
