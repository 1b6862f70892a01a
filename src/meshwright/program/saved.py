"""Copies of activations in a program: values that layers save for their backward go to the host and come back.

For each microbatch, and each unit of a stage that copies something (`cost.memory.away`),

    saved down  after the unit's forward, at the mark -1 - layer of the stage's forward
    saved up    prefetched when the stage's backward reaches the copying unit before it in backward order, at a mark of
                the backward named in the same way

A forward ends when all of its copies have ended, so copies up need not wait for them. Copies in each direction have one
stream, together with those of gradients and parameters. The time that units wait for copies is inside forwards and
backwards (`simulator.saved_waits`). Bytes are those that the kernels of CPUs save, for which graphs are captured; for
other devices they are an estimate.
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
    """Return the activations of a stage that the program copies to the host; ``plan`` and ``graph`` are lowered."""
    kept = as_kept(graph, plan.workload.numbers, "cpu")
    return find_away(kept, stage, plan.microbatch_size, plan.workload.float_bytes, "cpu")


def append_saved(
    builder: ProgramBuilder,
    computations: Computations,
    stages: tuple[StageSlice, ...],
    plan: Plan,
    graph: Graph,
) -> None:
    """Append the copies of a step. Raises PlanError for backwards in two parts."""
    if np.isin(computations.opcode, (Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)).any():
        raise PlanError(
            f"The plan keeps {plan.offload.describe()} under {plan.schedule}, whose backwards come in two parts, which "
            "both read what layers kept; expected whole backwards. Choose 1f1b, or leave activations=host out."
        )
    away_of = [stage_away(graph, plan, stage) for stage in stages]
    _append(builder, computations, away_of, forward=True)
    _append(builder, computations, away_of, forward=False)


def _append(builder: ProgramBuilder, computations: Computations, away_of: list[Away], *, forward: bool) -> None:
    """Append the copies in one direction."""
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
    """Return layer and bytes of the copies in one direction, in their order, shape (copies, 2)."""
    chosen = away.leaving if forward else away.coming
    rows = [
        (unit.layer, unit.down_bytes if forward else unit.up_bytes)
        for unit in (away.units[number] for number in chosen)
    ]
    return np.array(rows, np.int64).reshape(-1, 2)
