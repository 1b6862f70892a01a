"""Draws docs/images/controllers.svg: four workers, of which one is late at times, under policies that decide meanwhile.

    python docs/pictures/controllers.py

Each forward and backward takes 1 and 2 s; every worker takes three times as long in one of its iterations. Messages
take no time. A test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from pathlib import Path

from drawing import COLOURS, IDLE, Panel, legend, stack

from meshwright.program import ProgramBuilder
from meshwright.program.controllers import BackupWorkers, BoundedDelay, PartialReduce
from meshwright.simulator import ControlledRun, bare_costs, simulate_controlled
from meshwright.spec import Backward, Forward, Opcode, write_text
from meshwright.spec.control import Issue

PICTURE = Path(__file__).resolve().parent.parent / "images" / "controllers.svg"
WORKERS, ITERATIONS = 4, 6
SECOND = 10**12
# Worker w is late in this iteration.
LATE = (4, 1, 2, 0)
PIXELS_PER_S = 20.5
LEGEND = legend(
    (COLOURS[Opcode.FORWARD], "forward"),
    (COLOURS[Opcode.BACKWARD], "backward"),
    (IDLE, "idle"),
)


def draw() -> str:
    """The whole picture as SVG."""
    policies = (
        ("all wait for all: no backup workers", BackupWorkers(num_workers=4, num_backups=0, num_versions=ITERATIONS)),
        ("one backup worker: three gradients are enough", _backups()),
        ("bounded delay: at most 2 ahead of the slowest", BoundedDelay(num_workers=4, max_delay=2, num_clocks=6)),
        ("partial reduce: the first two are a group", PartialReduce(num_workers=4, group_size=2, num_iterations=6)),
    )
    panels = []
    for title, policy in policies:
        result = _run(policy)
        panels.append(
            Panel(
                title=title,
                result=result,
                pixels_per_s=PIXELS_PER_S,
                tracks=tuple((rank, "compute") for rank in range(WORKERS)),
                note=_note(result),
            )
        )
    return stack("Four workers under policies that decide while they run", LEGEND, panels)


def _backups() -> BackupWorkers:
    return BackupWorkers(num_workers=WORKERS, num_backups=1, num_versions=ITERATIONS)


def _run(policy: BackupWorkers | BoundedDelay | PartialReduce) -> ControlledRun:
    program = ProgramBuilder(policy.num_ranks).build(schedule="controlled", plan_hash="")
    costs = bare_costs(program, [0, SECOND, 2 * SECOND, 3 * SECOND, 6 * SECOND])
    return simulate_controlled(program, costs, policy, _estimate)


def _estimate(issue: Issue, _: int) -> tuple[int, int]:
    if not isinstance(issue.instruction, Forward | Backward):
        return 0, -1
    iteration, worker = divmod(issue.instruction.microbatch, WORKERS)
    usual = 1 if isinstance(issue.instruction, Forward) else 2
    return usual + 2 * (LATE[worker] == iteration), -1


def _note(result: ControlledRun) -> str:
    computed = int((result.timeline.opcode == Opcode.BACKWARD).sum())
    dropped = getattr(result.state, "dropped", 0)
    used = f"{computed - dropped} gradients" + (f", {dropped} dropped" if dropped else "")
    return f"{used}, {result.timeline.duration_s:.0f} s"


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
