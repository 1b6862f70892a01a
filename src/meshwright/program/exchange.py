"""Gradient sums and updates of a synchronous program: what follows the last backward of each stage.

    sums     after the last backward of a stage, or with overlap inside it, its buckets are summed, whole or in parts
    agreed   then all ranks all-reduce single numbers: the norm of all gradients, whether one is infinite
    steps    every stage is updated
    back     with a sharded optimizer, sums were scattered and a step updated the rank's shard, so parameters are
             gathered; in local SGD gradients were not summed, and parameters are averaged now. Those of the first
             layers come first, and the first forward of a stage in the next step waits for them

A *seat* is a stage on one of its ranks, numbered as in `transfers.Computations.replicas`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket
from meshwright.program.builder import ProgramBuilder
from meshwright.program.hierarchy import append_hierarchical, append_hybrid
from meshwright.program.parts import PartRows, append_rows, cut_parts, parts_of
from meshwright.program.servers import append_servers
from meshwright.program.transfers import Computations, find_first_forwards, find_last_backwards
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode
from meshwright.spec.precision import Numbers
from meshwright.spec.slices import StageSlice

Ids = NDArray[np.int64]
# Bytes of a number on which ranks agree.
_NUMBER_BYTES = 4


class ExchangeSeats(NamedTuple):
    """Stage, rank and index of the last backward of each seat, shape (seats,)."""

    stage: Ids
    rank: Ids
    last: Ids


class SeatMap(NamedTuple):
    """Pairs of a seat and a row of the exchange that it holds: ``seat[h]`` holds ``row[h]``."""

    seat: Ids
    row: Ids


class ExchangeHandles(NamedTuple):
    """Handles of an exchange: of the sums (rows,), of the steps (seats,; -1 for none), and of the agreements.

    ``agreed`` has handles of shape (ranks,) for each number on which all ranks agree.
    """

    seats: ExchangeSeats
    rows: PartRows
    held: SeatMap
    sums: Ids | None
    agreed: list[Ids]
    steps: Ids


def find_trained(graph: Graph, stages: tuple[StageSlice, ...]) -> NDArray[np.bool_]:
    """Return which stages have a parameter to train, shape (stages,)."""
    return np.array([any(graph.tensors[item].requires_grad for item in stage.parameters) for stage in stages])


def append_exchange(
    builder: ProgramBuilder,
    computations: Computations,
    trained: NDArray[np.bool_],
    buckets: tuple[Bucket, ...],
    exchange: GradientExchange,
    numbers: Numbers,
    num_agreed: int,
    first: Computations,
) -> ExchangeHandles:
    """Append the exchange of the buckets and the steps of the trained stages.

    ``numbers`` gives the types in which gradients and parameters are sent. ``num_agreed``: numbers on which all ranks
    agree. ``first``: the computations of the first step of the body, which has several steps if exchanges are rare.
    """
    num_replicas = np.diff(computations.replica_offsets)
    seats = ExchangeSeats(
        np.repeat(np.arange(len(trained)), num_replicas),
        computations.replicas.astype(np.int64),
        find_last_backwards(computations),
    )
    rows, held = _lay_out(builder, computations, seats, buckets, exchange)
    sums: Ids | None
    gathering = rows.group
    if exchange.shard_optimizer and exchange.shard_size:
        sums, gathering = append_hybrid(builder, rows, buckets, exchange, numbers.gradient_bytes)
    else:
        sums = _append_sums(builder, rows, buckets, exchange, len(computations.offsets) - 1)
    stepping = np.flatnonzero(trained[seats.stage])
    stepping = stepping[np.lexsort((seats.stage[stepping], seats.rank[stepping]))]
    agreed = _append_agreements(builder, computations, seats, rows, sums, num_agreed)
    steps = np.full(len(seats.stage), -1, np.int64)
    steps[stepping] = builder.extend(
        np.searchsorted(seats.rank[stepping], np.arange(len(computations.offsets))),
        "compute",
        opcode=Opcode.OPTIMIZER_STEP,
        stage=seats.stage[stepping],
    )
    if sums is not None:
        builder.wait_each(steps[held.seat], sums[held.row])
    for agreement in agreed:
        builder.wait_each(steps[stepping], agreement[seats.rank[stepping]])
    if exchange.shard_optimizer or exchange.every_steps > 1:
        order = np.lexsort((rows.part, -rows.bucket, rows.stage, rows.rank))
        opcode = Opcode.ALL_GATHER if exchange.shard_optimizer else Opcode.ALL_REDUCE
        num_bytes = rows.num_bytes * numbers.value_bytes // numbers.gradient_bytes
        back = append_rows(builder, rows, order, opcode, num_bytes, gathering)
        builder.wait_each(back[held.row], steps[held.seat])
        forwards = first.handle[find_first_forwards(first)[held.seat]]
        builder.wait_late_each(forwards, back[held.row])
    return ExchangeHandles(seats, rows, held, sums, agreed, steps)


def _append_sums(
    builder: ProgramBuilder, rows: PartRows, buckets: tuple[Bucket, ...], exchange: GradientExchange, num_ranks: int
) -> Ids | None:
    """Return, for each row, the handle at which its rank has the sum; None if replicas update independently."""
    if exchange.every_steps > 1:
        return None
    if exchange.servers:
        return append_servers(builder, rows, num_ranks, exchange)
    if exchange.algorithm == "hierarchical":
        return append_hierarchical(builder, rows, buckets, exchange.node_size)
    order = np.lexsort((rows.place, rows.rank))
    opcode = Opcode.REDUCE_SCATTER if exchange.shard_optimizer else Opcode.ALL_REDUCE
    sums = append_rows(builder, rows, order, opcode, rows.num_bytes, rows.group)
    builder.wait_each(sums, rows.ready)
    return sums


def _append_agreements(
    builder: ProgramBuilder,
    computations: Computations,
    seats: ExchangeSeats,
    rows: PartRows,
    sums: Ids | None,
    count: int,
) -> list[Ids]:
    """Return, for each number on which all ranks agree, the handle of every rank."""
    num_ranks = len(computations.offsets) - 1
    group = builder.group(tuple(range(num_ranks)))
    lowest = np.full(num_ranks, len(seats.stage), np.int64)
    np.minimum.at(lowest, seats.rank, seats.stage)
    found: list[Ids] = []
    for number in range(count):
        handles = builder.extend(
            np.arange(num_ranks + 1),
            "exchange",
            opcode=Opcode.ALL_REDUCE,
            stage=lowest,
            version=-1,
            peer=int(rows.part.max(initial=-1)) + 1 + number,
            num_bytes=_NUMBER_BYTES,
            group=group,
        )
        builder.wait_each(handles[seats.rank], computations.handle[seats.last])
        if sums is not None:
            builder.wait_each(handles[rows.rank], sums)
        found.append(handles)
    return found


def _lay_out(
    builder: ProgramBuilder,
    computations: Computations,
    seats: ExchangeSeats,
    buckets: tuple[Bucket, ...],
    exchange: GradientExchange,
) -> tuple[PartRows, SeatMap]:
    """Return every part on every rank that holds it, and the seats that hold it there.

    A parameter that several stages of a rank share is exchanged once, when all its gradients are ready.
    """
    index = np.repeat([bucket.index for bucket in buckets], [len(bucket.stages) for bucket in buckets]).astype(np.int64)
    stages = np.array([stage for bucket in buckets for stage in bucket.stages], np.int64)
    counts = np.diff(computations.replica_offsets)[stages]
    begin = computations.replica_offsets[stages] - (np.cumsum(counts) - counts)
    seat, index = np.repeat(begin, counts) + np.arange(counts.sum()), np.repeat(index, counts)
    order = np.lexsort((seats.last[seat], index, seats.rank[seat]))
    seat, index = seat[order], index[order]
    latest = np.flatnonzero((np.diff(index, append=-1) != 0) | (np.diff(seats.rank[seat], append=-1) != 0))
    exchanged = np.searchsorted(latest, np.arange(len(seat)))
    bucket, ending, parts = index[latest], seat[latest], cut_parts(buckets, exchange)
    ready = computations.handle[seats.last[ending]]
    if exchange.overlap and exchange.every_steps == 1:
        ready = builder.mark_each(ready, bucket)
    part, row = parts_of(parts, bucket)
    rows = PartRows(
        part=part,
        bucket=bucket[row],
        place=parts.place[part],
        num_bytes=parts.num_bytes[part],
        rank=seats.rank[ending[row]],
        stage=seats.stage[ending[row]],
        ready=ready[row],
        group=np.array([builder.group(item.ranks) for item in buckets], np.int64)[bucket[row]],
    )
    # The parts of a bucket on a rank are consecutive rows.
    begins, ends = (np.searchsorted(row, exchanged, side=side) for side in ("left", "right"))
    which = np.repeat(np.arange(len(seat)), ends - begins)
    before = np.cumsum(ends - begins) - (ends - begins)
    return rows, SeatMap(seat[which], begins[which] + np.arange(len(which)) - before[which])
