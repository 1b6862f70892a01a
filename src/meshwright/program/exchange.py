"""Sums of gradients and updates of a program that flushes: what follows the last backward of each stage.

After the last backward of a stage (or, with overlap, inside of it) its buckets are summed, whole or in `parts`, then
comes its step. With a sharded optimizer sums are scattered, a step updates the rank's part of each bucket, and then the
parameters are gathered, those of the first layers first; the first forward of the stage in the next step waits for
them. A *seat* is a stage on one of its ranks, numbered as in `transfers.Computations.replicas`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket
from meshwright.program.builder import ProgramBuilder
from meshwright.program.hierarchy import append_hierarchical
from meshwright.program.parts import PartRows, cut_parts, parts_of
from meshwright.program.servers import append_servers
from meshwright.program.transfers import Computations, find_first_forwards, find_last_backwards
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode
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
    held, parts = _find_held(buckets, computations, num_replicas, last), cut_parts(buckets, exchange)
    bucket, seat = held.bucket[held.latest], held.seat[held.latest]
    part, row = parts_of(parts, bucket)
    group = np.array([builder.group(item.ranks) for item in buckets], np.int64)

    def extend(order: Ids, opcode: Opcode) -> Ids:
        handles, own, moved = np.empty(len(part), np.int64), seat[row[order]], part[order]
        handles[order] = builder.extend(
            np.searchsorted(rank_of[own], ranks),
            "exchange",
            opcode=opcode,
            stage=stage_of[own],
            version=-1,
            peer=moved,
            num_bytes=parts.num_bytes[moved],
            group=group[parts.bucket[moved]],
        )
        return handles

    ready = computations.handle[last[seat]]
    ready = (builder.mark_each(ready, bucket) if exchange.overlap else ready)[row]
    rows = PartRows(part, rank_of[seat[row]], stage_of[seat[row]], ready)
    if exchange.algorithm == "hierarchical":
        sums = append_hierarchical(builder, rows, parts, buckets, exchange.node_size)
    elif exchange.servers:
        sums = append_servers(builder, rows, parts, group, len(ranks) - 1, exchange)
    else:
        order = np.lexsort((parts.place[part], rank_of[seat[row]]))
        sums = extend(order, Opcode.REDUCE_SCATTER if exchange.shard_optimizer else Opcode.ALL_REDUCE)
        builder.wait_each(sums, ready)
    stepping = np.flatnonzero(trained[stage_of])
    stepping = stepping[np.lexsort((stage_of[stepping], rank_of[stepping]))]
    steps = np.empty(len(stage_of), np.int64)
    steps[stepping] = builder.extend(
        np.searchsorted(rank_of[stepping], ranks),
        "compute",
        opcode=Opcode.OPTIMIZER_STEP,
        stage=stage_of[stepping],
    )
    # What each seat holds of what its rank exchanges, part by part.
    moved, holding = _expand(row, held.exchanged)
    builder.wait_each(steps[held.seat[holding]], sums[moved])
    if exchange.shard_optimizer:
        order = np.lexsort((part, -bucket[row], stage_of[seat[row]], rank_of[seat[row]]))
        gathers = extend(order, Opcode.ALL_GATHER)
        builder.wait_each(gathers[moved], steps[held.seat[holding]])
        forwards = computations.handle[find_first_forwards(computations)[held.seat]]
        builder.wait_late_each(forwards[holding], gathers[moved])


def _expand(row: Ids, wanted: Ids) -> tuple[Ids, Ids]:
    """Places in the ascending column ``row`` where it has each of the wanted values, and which of them that is."""
    begins, ends = (np.searchsorted(row, wanted, side=side) for side in ("left", "right"))
    which = np.repeat(np.arange(len(wanted)), ends - begins)
    first = np.cumsum(ends - begins) - (ends - begins)
    return begins[which] + np.arange(len(which)) - first[which], which


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
