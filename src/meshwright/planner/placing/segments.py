"""From tasks on devices to the stages of a placement: runs of tasks without communication in between.

Tasks are taken in one order of all devices in which each follows what it reads. A stage ends behind a task from which
another device reads, so that it leaves at once, and before a task that is the first of its device to read something
from another one, so that nobody waits longer than he must. So a stage waits only before its first task, and others wait
only for its last one: stages can be ordered as their first tasks are.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.placing.op_tasks import Tasks
from meshwright.spec import PlacedStage


def cut_stages(tasks: Tasks, ranks: Sequence[int], order: Sequence[int]) -> tuple[PlacedStage, ...]:
    """The stages of tasks on ``ranks``, of shape (tasks,), in an ``order`` in which each follows what it reads."""
    leaves = [False] * len(tasks.ops)
    for task, reads in enumerate(tasks.reads):
        for source, _ in reads:
            leaves[source] |= ranks[source] != ranks[task]
    stages: list[tuple[int, list[int]]] = []
    open_stage: dict[int, int] = {}
    there: set[tuple[int, int, int]] = set()
    for task in order:
        rank = ranks[task]
        arriving = {(source, tensor, rank) for source, tensor in tasks.reads[task] if ranks[source] != rank} - there
        there |= arriving
        if arriving or rank not in open_stage:
            open_stage[rank] = len(stages)
            stages.append((rank, []))
        stages[open_stage[rank]][1].extend(tasks.ops[task])
        if leaves[task]:
            del open_stage[rank]
    return tuple(PlacedStage(rank=rank, ops=tuple(sorted(ops))) for rank, ops in stages)
