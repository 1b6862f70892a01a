"""Before a placement runs: does it keep together what writes to the same memory?

The planner goes by names (`planner.op_tasks`), for a graph does not say what an op writes. A captured model does
(`capture.writes`): memory that is written must be in one stage, from its first maker to its last write, and for good
where it is state. A placement that breaks this would compute other numbers than one process, so it is refused.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.capture import Captured
from meshwright.spec.errors import PlanError
from meshwright.spec.placement import Placement, check_placement

_HELD = ("input", "parameter", "buffer", "constant")


def check_placed_writes(captured: Captured, placement: Placement) -> None:
    """Raise PlanError if the placement does not fit the graph, or parts ops that write to the same memory."""
    check_placement(placement, captured.graph)
    table = captured.table
    memory = [row.slot.storage if row.slot.storage >= 0 else -2 - i for i, row in enumerate(table.tensors)]
    stage_of = {op: index for index, stage in enumerate(placement.stages) for op in stage.ops}
    touching: dict[int, list[int]] = defaultdict(list)
    last_write: dict[int, int] = {}
    for op, row in enumerate(table.ops):
        for piece in dict.fromkeys(memory[i] for i in (*row.inputs, *row.outputs)):
            touching[piece].append(op)
        last_write.update((memory[i], op) for i in row.written)
    held = {memory[i] for i, row in enumerate(table.tensors) if row.role in _HELD}
    for piece, last in last_write.items():
        ops = [op for op in touching[piece] if op in stage_of and (piece in held or op <= last)]
        stages = sorted({stage_of[op] for op in ops})
        if len(stages) > 1:
            first, other = (next(op for op in ops if stage_of[op] == stage) for stage in stages[:2])
            names = captured.graph.ops[first].name, captured.graph.ops[other].name, captured.graph.ops[last].name
            raise PlanError(
                f"The placement has {names[0]!r} in stage {stages[0]} and {names[1]!r} in stage {stages[1]}, but both "
                f"use memory that {names[2]!r} writes in place, so one of them would read an old value. Place the "
                "graph again; if an operator of your own writes to its arguments, end its name with an underscore, or "
                "plan by layers with `meshwright plan`."
            )
