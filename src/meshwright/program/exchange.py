"""Sums of gradients and updates of a program that flushes: what follows the last backward of each stage.

After the last backward of a stage (or, with overlap, inside of it) its buckets are summed, then comes its step. With a
sharded optimizer sums are scattered, a step updates the rank's part of each bucket, and then the parameters are
gathered, those of the first layers first; the first forward of the stage in the next step waits for them. A *seat* is a
stage on one of its ranks, numbered as in `transfers.Computations.replicas`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket
from meshwright.program.builder import ProgramBuilder
from meshwright.program.transfers import Computations, find_first_forwards, find_last_backwards
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import GradientExchange
from meshwright.spec.slices import StageSlice

Ids = NDArray[np.int64]


class _Held(NamedTuple):
    """Which bucket is held by which seat, columns of shape (n,), by rank, bucket and the end of the seat's backwards.

    A parameter that several stages of a rank share is exchanged once, when all its gradients are there: ``latest`` are
    the last rows of each rank and bucket, and row i belongs to the ``exchanged[i]``-th of them.
    """

    bucket: Ids
    seat: Ids
    latest: Ids
    exchanged: Ids


def find_trained(graph: Graph, stages: tuple[StageSlice, ...]) -> NDArray[np.bool_]:
    """Which stages have a parameter to train, shape (stages,)."""
    return np.array([any(graph.tensors[item].requires_grad for item in stage.parameters) for stage in stages])


def append_exchange(
    builder: ProgramBuilder,
    computations: Computations,
    trained: NDArray[np.bool_],
    buckets: tuple[Bucket, ...],
    exchange: GradientExchange,
) -> None:
    """Write down the exchange of the buckets and the steps of the trained stages."""
    num_replicas = np.diff(computations.replica_offsets)
    stage_of, rank_of = np.repeat(np.arange(len(trained)), num_replicas), computations.replicas.astype(np.int64)
    ranks = np.arange(len(computations.offsets))
    last = find_last_backwards(computations)
    held = _find_held(buckets, computations, num_replicas, last)
    summed, seat = held.bucket[held.latest], held.seat[held.latest]
    num_bytes = np.array([bucket.num_bytes for bucket in buckets], np.int64)
    group = np.array([builder.group(bucket.ranks) for bucket in buckets], np.int64)

    def extend(rows: Ids, opcode: Opcode) -> Ids:
        return builder.extend(
            np.searchsorted(rank_of[seat[rows]], ranks),
            "exchange",
            opcode=opcode,
            stage=stage_of[seat[rows]],
            version=-1,
            peer=summed[rows],
            num_bytes=num_bytes[summed[rows]],
            group=group[summed[rows]],
        )

    sums = extend(np.arange(len(summed)), Opcode.REDUCE_SCATTER if exchange.shard_optimizer else Opcode.ALL_REDUCE)
    ready = computations.handle[last[seat]]
    builder.wait_each(sums, builder.mark_each(ready, summed) if exchange.overlap else ready)
    stepping = np.flatnonzero(trained[stage_of])
    stepping = stepping[np.lexsort((stage_of[stepping], rank_of[stepping]))]
    steps = np.empty(len(stage_of), np.int64)
    steps[stepping] = builder.extend(
        np.searchsorted(rank_of[stepping], ranks),
        "compute",
        opcode=Opcode.OPTIMIZER_STEP,
        stage=stage_of[stepping],
    )
    builder.wait_each(steps[held.seat], sums[held.exchanged])
    if exchange.shard_optimizer:
        order = np.lexsort((-summed, stage_of[seat], rank_of[seat]))
        gathers = np.empty(len(summed), np.int64)
        gathers[order] = extend(order, Opcode.ALL_GATHER)
        builder.wait_each(gathers[held.exchanged], steps[held.seat])
        forwards = computations.handle[find_first_forwards(computations)[held.seat]]
        builder.wait_late_each(forwards, gathers[held.exchanged])


def _find_held(buckets: tuple[Bucket, ...], computations: Computations, num_replicas: Ids, last: Ids) -> _Held:
    indices = np.repeat([bucket.index for bucket in buckets], [len(bucket.stages) for bucket in buckets])
    stages = np.array([stage for bucket in buckets for stage in bucket.stages], np.int64)
    counts = num_replicas[stages]
    first = computations.replica_offsets[stages] - (np.cumsum(counts) - counts)
    seat = np.repeat(first, counts)
    seat += np.arange(len(seat))
    index, rank = np.repeat(indices, counts).astype(np.int64), computations.replicas[seat].astype(np.int64)
    order = np.lexsort((last[seat], index, rank))
    index, seat, rank = index[order], seat[order], rank[order]
    latest = np.flatnonzero((np.diff(index, append=-1) != 0) | (np.diff(rank, append=-1) != 0))
    return _Held(index, seat, latest, np.searchsorted(latest, np.arange(len(seat))))
