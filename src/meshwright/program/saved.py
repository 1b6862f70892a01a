"""Copies of activations in a program: what layers keep for their backward goes to the host and comes back.

For each microbatch, and each unit of a stage that copies something (`cost.memory.away`),

    saved down  behind the unit's forward, of which the stage's forward raises the mark -1 - layer
    saved up    when the stage's backward comes to the unit behind it (that something comes up for), of which it raises
                such a mark

A forward ends when all of its copies have ended, so that those up need not wait for them. Copies each way have a stream
of their own, with those of gradients and parameters. What units wait for copies stands within forwards and backwards
(`simulator.saved_waits`). Bytes are those that the kernels of processors keep, for which graphs are captured; others
are estimated by what theirs keep.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.memory import Away, as_kept, find_away
from meshwright.program.builder import ProgramBuilder
from meshwright.program.transfers import Computations
from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import Plan
from meshwright.spec.slices import StageSlice


def stage_away(graph: Graph, plan: Plan, stage: StageSlice) -> Away:
    """What of a stage is away by the program; of a plan that was lowered."""
    kept = as_kept(graph, plan.workload.numbers, "cpu")
    return find_away(kept, stage, plan.microbatch_size, plan.workload.float_bytes, "cpu")


def append_saved(
    builder: ProgramBuilder,
    computations: Computations,
    stages: tuple[StageSlice, ...],
    plan: Plan,
    graph: Graph,
) -> None:
    """Write down the copies of a step. Raises PlanError for backwards in two parts."""
    if np.isin(computations.opcode, (Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)).any():
        raise PlanError(
            f"The plan keeps {plan.offload.describe()} under {plan.schedule}, whose backwards come in two parts, of "
            "which both read what layers kept; expected whole backwards. Choose 1f1b, or leave activations=host out."
        )
    away_of = [stage_away(graph, plan, stage) for stage in stages]
    _append(builder, computations, away_of, forward=True)
    _append(builder, computations, away_of, forward=False)


def _append(builder: ProgramBuilder, computations: Computations, away_of: list[Away], *, forward: bool) -> None:
    """The copies one way."""
    stages, opcode = computations.stage, Opcode.FORWARD if forward else Opcode.BACKWARD
    tables = [_copies(away, forward=forward) for away in away_of]
    counts = np.array([len(table) for table in tables], np.int64)
    begins = np.concatenate([[0], np.cumsum(counts)])
    layer, num_bytes = np.concatenate([np.zeros((0, 2), np.int64), *tables]).T
    rows = np.flatnonzero(computations.opcode == opcode)
    repeats = counts[stages[rows]]
    row = np.repeat(rows, repeats)
    first = np.repeat(np.concatenate([[0], np.cumsum(repeats)[:-1]]), repeats)
    place = begins[stages[row]] + np.arange(len(row)) - first
    offsets = np.searchsorted(row, computations.offsets)
    rank = np.searchsorted(computations.offsets, row, side="right") - 1
    groups = np.array([builder.group((index,)) for index in range(len(computations.offsets) - 1)], np.int64)
    handles = builder.extend(
        offsets,
        "down" if forward else "up",
        opcode=Opcode.SAVED_DOWN if forward else Opcode.SAVED_UP,
        stage=stages[row],
        microbatch=computations.microbatch[row],
        version=-1,
        peer=layer[place],
        num_bytes=num_bytes[place],
        group=groups[rank],
    )
    builder.wait_each(handles, builder.mark_each(computations.handle[row], -1 - layer[place]))


def _copies(away: Away, *, forward: bool) -> NDArray[np.int64]:
    """Layer and bytes of the copies one way, in their order, shape (copies, 2)."""
    chosen = away.leaving if forward else away.coming
    rows = [
        (unit.layer, unit.down_bytes if forward else unit.up_bytes)
        for unit in (away.units[number] for number in chosen)
    ]
    return np.array(rows, np.int64).reshape(-1, 2)
