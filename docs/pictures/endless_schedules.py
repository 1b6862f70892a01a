"""Draws docs/images/endless_schedules.svg: asynchronous schedules and 1F1B, as the simulator times them.

    python docs/pictures/endless_schedules.py

The layers of `schedules.py`, four minibatches to a step; one repetition of the body, with what fills the pipeline
before and empties it afterwards.
"""

from __future__ import annotations

from pathlib import Path

from drawing import COLOURS, IDLE, draw_schedules, legend

from meshwright.spec import Opcode, write_text

PICTURE = Path(__file__).resolve().parent.parent / "images" / "endless_schedules.svg"
PIXELS_PER_S = 9.4
FOUR_STAGES = [(2, (rank,)) for rank in range(4)]
PANELS = (
    ("1F1B flushes: its step of four microbatches has a bubble of (p − 1)(F + B)", "1f1b"),
    ("PipeDream: an update after every backward; rank 0 keeps the weights of three older versions", "pipedream"),
    ("PipeDream-2BW: an update after every fourth backward; two versions on every rank", "pipedream-2bw"),
)
LEGEND = legend(
    (COLOURS[Opcode.FORWARD], "forward of the minibatch with this number"),
    (COLOURS[Opcode.BACKWARD], "its backward"),
    (IDLE, "idle"),
)


def draw() -> str:
    """The whole picture as SVG."""
    rows = [(title, FOUR_STAGES, schedule) for title, schedule in PANELS]
    return draw_schedules("Asynchronous schedules", LEGEND, rows, PIXELS_PER_S, num_microbatches=4, batch=4)


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
