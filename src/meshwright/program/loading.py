"""An input pipeline as a bounded queue: each rank has a loader that makes one microbatch after the other.

A rank that reads inputs of the graph takes its microbatches from a queue of depth q. Its loader works by itself, at its
own rate, until the queue is full: microbatch k is begun when microbatch k - q has been through its forward, be that in
this step or an earlier one. A forward waits for its microbatch. So a slow loader keeps the device waiting, and a slow
device the loader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.program.builder import ProgramBuilder
from meshwright.program.transfers import Computations
from meshwright.spec.instructions import Opcode
from meshwright.spec.slices import StageSlice

Ids = NDArray[np.int64]


def append_loads(
    builder: ProgramBuilder, computations: Sequence[Computations], stages: tuple[StageSlice, ...], depth: int
) -> None:
    """Write the loads of all steps of a body, which ``computations`` has one by one."""
    reads = np.array([bool(stage.inputs) for stage in stages])
    num_ranks = len(computations[0].offsets) - 1
    for rank in range(num_ranks):
        taken, stage, microbatch = _consumers(computations, reads, rank)
        count = len(taken)
        if not count:
            continue
        offsets = np.where(np.arange(num_ranks + 1) > rank, count, 0)
        loads = builder.extend(
            offsets,
            "load",
            opcode=Opcode.LOAD,
            stage=stage,
            microbatch=microbatch,
            version=-1,
            group=builder.group((rank,)),
        )
        builder.wait_each(taken, loads)
        before = np.arange(count) - depth
        builder.wait_each(loads[before >= 0], taken[before[before >= 0]])
        late = np.flatnonzero(before < 0)
        builder.wait_late_each(loads[late], taken[before[late] % count], lag=-(before[late] // count))


def _consumers(computations: Sequence[Computations], reads: NDArray[np.bool_], rank: int) -> tuple[Ids, Ids, Ids]:
    """Handle, stage and microbatch of the first forward of a rank that reads each microbatch, in order."""
    parts = []
    for step in computations:
        rows = np.arange(step.offsets[rank], step.offsets[rank + 1])
        rows = rows[(step.opcode[rows] == Opcode.FORWARD) & reads[step.stage[rows]]]
        first = np.sort(np.unique(step.microbatch[rows], return_index=True)[1])
        rows = rows[first]
        parts.append((step.handle[rows], step.stage[rows], step.microbatch[rows]))
    handle, stage, microbatch = (np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True))
    return handle, stage, microbatch
