"""Sums of gradients and updates of a program that flushes: what follows the last backward of each stage.

After the last backward of a stage (or, with overlap, inside of it) its buckets are summed, then comes its step. A
*seat* is a stage on one of its ranks, numbered as in `transfers.Computations.replicas`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket
from meshwright.program.builder import ProgramBuilder
from meshwright.program.transfers import Computations, find_last_backwards
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode
from meshwright.spec.slices import StageSlice

Ids = NDArray[np.int64]


def find_trained(graph: Graph, stages: tuple[StageSlice, ...]) -> NDArray[np.bool_]:
    """Which stages have a parameter to train, shape (stages,)."""
    return np.array([any(graph.tensors[item].requires_grad for item in stage.parameters) for stage in stages])


def append_exchange(
    builder: ProgramBuilder,
    computations: Computations,
    trained: NDArray[np.bool_],
    buckets: tuple[Bucket, ...],
    *,
    overlap: bool,
) -> None:
    """Write down the sums of the buckets and the steps of the trained stages."""
    num_replicas = np.diff(computations.replica_offsets)
    stage_of, rank_of = np.repeat(np.arange(len(trained)), num_replicas), computations.replicas.astype(np.int64)
    ranks = np.arange(len(computations.offsets))
    last = find_last_backwards(computations)
    index, seat = _who_holds(buckets, computations, num_replicas)
    # A parameter that several stages of a rank share is summed once, when all its gradients are there.
    order = np.lexsort((last[seat], index, rank_of[seat]))
    index, seat = index[order], seat[order]
    latest = np.flatnonzero((np.diff(index, append=-1) != 0) | (np.diff(rank_of[seat], append=-1) != 0))
    summed, ready = index[latest], computations.handle[last[seat[latest]]]
    sums = builder.extend(
        np.searchsorted(rank_of[seat[latest]], ranks),
        "exchange",
        opcode=Opcode.ALL_REDUCE,
        stage=stage_of[seat[latest]],
        version=-1,
        peer=summed,
        num_bytes=np.array([bucket.num_bytes for bucket in buckets], np.int64)[summed],
        group=np.array([builder.group(bucket.ranks) for bucket in buckets], np.int64)[summed],
    )
    builder.wait_each(sums, builder.mark_each(ready, summed) if overlap else ready)
    stepping = np.flatnonzero(trained[stage_of])
    stepping = stepping[np.lexsort((stage_of[stepping], rank_of[stepping]))]
    steps = np.empty(len(stage_of), np.int64)
    steps[stepping] = builder.extend(
        np.searchsorted(rank_of[stepping], ranks),
        "compute",
        opcode=Opcode.OPTIMIZER_STEP,
        stage=stage_of[stepping],
    )
    builder.wait_each(steps[seat], sums[np.searchsorted(latest, np.arange(len(seat)))])


def _who_holds(buckets: tuple[Bucket, ...], computations: Computations, num_replicas: Ids) -> tuple[Ids, Ids]:
    """Which bucket is held by which seat: two columns with a row for each pair."""
    indices = np.repeat([bucket.index for bucket in buckets], [len(bucket.stages) for bucket in buckets])
    stages = np.array([stage for bucket in buckets for stage in bucket.stages], np.int64)
    counts = num_replicas[stages]
    first = computations.replica_offsets[stages] - (np.cumsum(counts) - counts)
    seats = np.repeat(first, counts)
    return np.repeat(indices, counts).astype(np.int64), seats + np.arange(len(seats))
