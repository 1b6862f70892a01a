"""Draws docs/images/schedule-*.svg: one picture per named schedule that flushes, as the simulator times it.

    python docs/pictures/schedules.py

Eight equal layers on four ranks, eight microbatches; a layer's forward takes one second, the gradient of its input one
and that of its weight one; transfers take next to nothing. A test (tests/docs/test_pictures.py) runs this and compares
with the files, so the pictures are what the code does.
"""

from __future__ import annotations

from pathlib import Path

from drawing import COLOURS, IDLE, draw_schedules, legend

from meshwright.simulator import Simulation
from meshwright.spec import Opcode, write_text

IMAGES = Path(__file__).resolve().parent.parent / "images"
PIXELS_PER_S = 12.6
FOUR = [(2, (rank,)) for rank in range(4)]
IN_TURN = [(1, (stage % 4,)) for stage in range(8)]
THERE_AND_BACK = [(1, (min(stage, 7 - stage),)) for stage in range(8)]
BOTH_WAYS = [(2, (rank, 3 - rank)) for rank in range(4)]
REPLICAS = [(6, (0, 1, 2)), (2, (3,))]
# By the end of the picture's name: its title, the stages as (layers, ranks), the schedule.
PICTURES = {
    "gpipe": ("gpipe: all forwards, then all backwards", FOUR, "gpipe"),
    "1f1b": ("1f1b: as fast, with at most 4 microbatches in flight", FOUR, "1f1b"),
    "replicas": ("1f1b, replicated stages: 6 layers on ranks 0–2, 2 layers on rank 3", REPLICAS, "1f1b"),
    "zb-h1": ("zb-h1: gradients of weights fill what 1f1b leaves idle", FOUR, "zb-h1"),
    "zb-h2": ("zb-h2: more microbatches in flight, and no rank waits once it began", FOUR, "zb-h2"),
    "interleaved": ("interleaved: stages i and i + 4 on rank i", IN_TURN, "interleaved"),
    "looped-bfs": ("looped-bfs: the same stages, all microbatches through one after the other", IN_TURN, "looped-bfs"),
    "zb-v": ("zb-v: stages i and 7 − i on rank i", THERE_AND_BACK, "zb-v"),
    "dualpipe": ("dualpipe: two replicas of every stage, microbatches from both ends", BOTH_WAYS, "dualpipe"),
    "dualpipe-v": ("dualpipe-v: stages i and 7 − i, a forward and a backward together", THERE_AND_BACK, "dualpipe-v"),
}
WHOLE = legend(
    (COLOURS[Opcode.FORWARD], "forward of the microbatch with this number"),
    (COLOURS[Opcode.BACKWARD], "its backward"),
    (IDLE, "idle"),
)
PARTS = legend(
    (COLOURS[Opcode.FORWARD], "forward"),
    (COLOURS[Opcode.BACKWARD], "whole backward"),
    (COLOURS[Opcode.BACKWARD_INPUT], "gradients of inputs"),
    (COLOURS[Opcode.BACKWARD_WEIGHT], "gradients of weights"),
    (IDLE, "idle"),
)


def draw(name: str) -> str:
    """One picture as SVG."""
    row = PICTURES[name]
    key = PARTS if row[2].startswith(("zb", "dualpipe")) else WHOLE
    return draw_schedules(f"The schedule {row[2]}", key, [row], PIXELS_PER_S, note=describe)


def describe(result: Simulation) -> str:
    """A step among others: ranks may begin the next one while others end theirs."""
    work_s = result.timeline.busy_seconds().mean()
    return f"step {result.step_time_s:.0f} s, bubble {100 * (1 - work_s / result.step_time_s):.1f} %"


if __name__ == "__main__":
    for name in PICTURES:
        print(f"written: {write_text(draw(name), IMAGES / f'schedule-{name}.svg')}")
