"""Draws docs/images/critical-path.svg: what bounds a pipeline with one slow stage, and with that stage mended.

    python docs/pictures/critical_path.py

A test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drawing import COLOURS, IDLE, MARGIN, ROW, Panel, chain, cluster, lay_out, legend, picture

from meshwright.simulator import explain_step, simulate_plan
from meshwright.spec import Opcode, Timeline, write_text

PICTURE = Path(__file__).resolve().parent.parent / "images" / "critical-path.svg"
PIXELS_PER_S = 9.6
PATH = "#b3261e"
STAGES = [(2, (rank,)) for rank in range(4)]
PANELS = (
    ("Stage 1 takes half as long again as the others: the path runs through it", (1, 1, 1.5, 1.5, 1, 1, 1, 1)),
    ("The same with stage 1 a third shorter: all stages bound the step", (1,) * 8),
)
LEGEND = legend(
    (COLOURS[Opcode.FORWARD], "forward of the microbatch with this number"),
    (COLOURS[Opcode.BACKWARD], "its backward"),
    (IDLE, "idle"),
    (PATH, "critical path"),
)


def draw() -> str:
    """The whole picture as SVG."""
    body, top = list(LEGEND), 40.0
    for title, seconds in PANELS:
        lines, top = _panel(title, seconds, top)
        body += lines
    return picture("The critical path of a pipeline", body, top)


def _panel(title: str, seconds: Sequence[float], top: float) -> tuple[list[str], float]:
    graph = chain(seconds)
    plan, machines = lay_out(graph, STAGES, "1f1b"), cluster(len(STAGES))
    explained = explain_step(plan, graph, machines)
    slow = sum(item.path_s for item in explained.levers if item.name.endswith("of stage 1"))
    note = f"step {explained.step_time_s:.0f} s, {slow:.0f} s of the path in stage 1"
    panel = Panel(title=title, result=simulate_plan(plan, graph, machines), pixels_per_s=PIXELS_PER_S, note=note)
    lines, below = panel.draw(top)
    return lines + _outline(explained.path, top + 26), below


def _outline(path: Timeline, top: float) -> list[str]:
    """Frames around what the ranks compute on the path, and lines where it goes from one rank to another."""
    lines = []
    before = None
    for k in range(path.num_spans):
        rank = path.tracks[path.track[k]].rank
        x, end = (MARGIN + int(edge[k]) / 1e12 * PIXELS_PER_S for edge in (path.start_ps, path.end_ps))
        if end - x < 0.5:
            continue
        y = top + rank * ROW
        if before is not None and before != rank:
            middles = sorted(top + each * ROW + (ROW - 4) / 2 for each in (before, rank))
            lines.append(
                f'<path d="M{x:.1f} {middles[0]:g}V{middles[1]:g}" stroke="{PATH}" stroke-width="2.5" fill="none"/>'
            )
        lines.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{end - x:.1f}" height="{ROW - 4}" fill="none" stroke="{PATH}" '
            'stroke-width="2.5"/>'
        )
        before = rank
    return lines


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
