"""Offload in a program: copies of activations, optimizer updates on the host, and the bytes that the host needs.

`append_saved` copies activations. `append_host_steps` appends updates piece by piece: copy gradients down, step on the
host, copy parameters up. `count_host_needs` counts bytes. A piece is a part of a summed bucket, or parameters of up to
a bucket's size that are in no bucket. For each piece, on every rank that holds it,

    copy down   the gradients, or the rank's shard of them: when they are summed, or, if they are not summed, when the
                last backward has made them
    read        the optimizer's states from the drives, if they are there: at most three pieces are on the host, one
                being read, one stepping and one being written
    host step   when gradients and states have arrived, after the last computation of the rank, because the optimizer's
                step is called then, and after everything that all ranks agree on
    copy up     the new parameters
    write       the new states to the drives

Copies in each direction, steps, reads and writes have streams of their own, so that they overlap. The optimizer's step
of a stage comes after the pieces of all of its parameters: it makes the new version and clears the gradients.
DeepSpeed's `PipelinedOptimizerSwapper` reads and writes one piece ahead and behind, Megatron-LM's
`HybridDeviceOptimizer` copies in both directions on separate streams. Gradients that are scattered inside backwards
(zero 2 and 3) are copied down after them, unless parameters are on the host, too: then both copies are made inside
passes (`simulator.state_shards`), and only states are read, stepped and written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.memory import Away, Backend, as_kept, find_away
from meshwright.cost.optimizers import STEP_COUNTER_BYTES, state_bytes
from meshwright.program.buckets import Bucket, fill_buckets, first_uses, gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.gradient_exchange import ExchangeHandles
from meshwright.program.orders import max_in_flight
from meshwright.program.stage_transfers import Computations
from meshwright.spec import Graph, Opcode, Plan, PlanError, StageSlice, slice_graph
from meshwright.spec.instructions import StreamName


def stage_away(graph: Graph, plan: Plan, stage: StageSlice) -> Away:
    """Return the activations of a stage that the program copies to the host (`cost.memory.away`).

    ``plan`` and ``graph`` are lowered (`plan_lowering`). Sizes are those that CPU kernels save.
    """
    kept = as_kept(graph, plan.workload.numbers, "cpu")
    return find_away(kept, stage, plan.microbatch_size, plan.workload.float_bytes, "cpu")


# For each microbatch, and each unit of a stage that copies values (`cost.memory.away`),
#
#     saved down  after the unit's forward, at the mark -1 - layer of the stage's forward
#     saved up    prefetched when the stage's backward reaches the copying unit before it in backward order, at a mark
#                 of the backward named in the same way
#
# A forward ends when all of its copies have ended, so copies up need not wait for them. Copies in each direction have
# one stream, together with those of gradients and parameters. The time that units wait for copies is inside forwards
# and backwards (`simulator.saved_waits`). Bytes are those that the kernels of CPUs save, for which graphs are captured;
# for other devices they are an estimate.
def append_saved(
    builder: ProgramBuilder,
    computations: Computations,
    stages: tuple[StageSlice, ...],
    plan: Plan,
    graph: Graph,
) -> None:
    """Append the activation copies of one step: saved values go to the host after a forward and return for a backward.

    Raises PlanError if the schedule computes backwards in two parts.
    """
    if np.isin(computations.opcode, (Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)).any():
        raise PlanError(
            f"The plan keeps {plan.offload.describe()} under {plan.schedule}, whose backwards have two parts that both "
            "read the saved activations; expected whole backwards. Choose 1f1b, or leave activations=host out."
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


Ids = NDArray[np.int64]

# Most pieces whose states are on the host at a time, if they are kept on drives.
PIECES_AT_HAND = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPiece:
    """Parameters of one stage that are in no bucket and are updated together on the host.

    ``index`` continues the numbering of the buckets. ``parameters`` are tensor ids, ``num_bytes`` the bytes of their
    gradients.
    """

    index: int
    stage: int
    parameters: tuple[int, ...]
    num_bytes: int


@lru_cache(maxsize=64)
def host_pieces(graph: Graph, plan: Plan, buckets: tuple[Bucket, ...]) -> tuple[HostPiece, ...]:
    """Return the trained parameters that are in no bucket, as pieces: stages from the last to the first.

    Within a stage, parameters are in the order in which the backward makes their gradients ready. A parameter that
    several stages of one rank share belongs to the first of these stages, whose backward comes last.
    """
    taken = {parameter for bucket in buckets for parameter in bucket.parameters}
    first_use = first_uses(graph)
    own: dict[int, list[int]] = {}
    for stage in slice_graph(graph, plan.bounds):
        own[stage.index] = [i for i in stage.parameters if graph.tensors[i].requires_grad and i not in taken]
        taken.update(own[stage.index])
    pieces: list[HostPiece] = []
    for index in sorted(own, reverse=True):
        if not own[index]:
            continue
        ready_order = sorted(own[index], key=lambda parameter: (-first_use[parameter], parameter))
        for chosen, num_bytes in fill_buckets(graph, ready_order, plan):
            number = len(buckets) + len(pieces)
            pieces.append(HostPiece(index=number, stage=index, parameters=chosen, num_bytes=num_bytes))
    return tuple(pieces)


class _Pieces(NamedTuple):
    """Pieces on ranks, columns of shape (pieces,), and which of them the step of each seat needs, shape (needs,).

    ``ready`` is the handle at which the gradients are ready; the rank steps with ``num_bytes`` of them. Gradients and
    new parameters are ``copied`` unless both are on the host.
    """

    rank: Ids
    stage: Ids
    number: Ids
    num_bytes: Ids
    ready: Ids
    copied: NDArray[np.bool_]
    needing_seat: Ids
    needed: Ids


def append_host_steps(
    builder: ProgramBuilder,
    computations: Computations,
    done: ExchangeHandles,
    pieces: tuple[HostPiece, ...],
    plan: Plan,
    graph: Graph,
) -> None:
    """Append the optimizer updates of one step on the host: copies, host steps, and drive reads and writes.

    ``done`` has the handles of the preceding gradient exchange. ``plan`` is the whole plan, even if the program is of a
    `Fold`, because the whole plan determines how replicas shard gradients and states.
    """
    rows = _join(_unsummed(builder, computations, done, pieces, plan), _summed(done, plan, graph))
    last = computations.handle[computations.offsets[1:] - 1][rows.rank]
    every, copied = np.arange(len(rows.rank)), np.flatnonzero(rows.copied)
    step = _append_rows(builder, rows, every, "host", Opcode.HOST_STEP, rows.num_bytes)
    there, back = rows.ready.copy(), step.copy()
    there[copied] = _append_rows(builder, rows, copied, "down", Opcode.COPY_DOWN, rows.num_bytes)
    numbers = plan.workload.numbers
    parameter_bytes = rows.num_bytes * numbers.value_bytes // numbers.gradient_bytes
    back[copied] = _append_rows(builder, rows, copied, "up", Opcode.COPY_UP, parameter_bytes)
    builder.wait_each(there[copied], rows.ready[copied])
    for before in (there, last, *(agreement[rows.rank] for agreement in done.agreed)):
        builder.wait_each(step, before)
    builder.wait_each(back[copied], step[copied])
    builder.wait_each(done.steps[rows.needing_seat], back[rows.needed])
    if plan.offload.optimizer == "nvme":
        each = state_bytes(plan.workload.optimizer, plan.workload.precision)
        moved = -(-rows.num_bytes // numbers.gradient_bytes) * each
        read = _append_rows(builder, rows, every, "drives", Opcode.READ_STATES, moved)
        write = _append_rows(builder, rows, every, "drives", Opcode.WRITE_STATES, moved, lane=1)
        builder.wait_each(read, last)
        place = every - np.searchsorted(rows.rank, rows.rank)
        later = np.flatnonzero(place >= PIECES_AT_HAND)
        builder.wait_each(read[later], write[later - PIECES_AT_HAND])
        builder.wait_each(step, read)
        builder.wait_each(write, step)
        builder.wait_each(done.steps[rows.needing_seat], write[rows.needed])


def _append_rows(
    builder: ProgramBuilder,
    rows: _Pieces,
    chosen: Ids,
    stream: StreamName,
    opcode: Opcode,
    num_bytes: Ids,
    lane: int = 0,
) -> Ids:
    """Append one instruction per chosen piece on a stream of its rank; return their handles."""
    num_ranks = int(rows.rank.max(initial=-1)) + 1
    groups = np.array([builder.group((rank,)) for rank in range(num_ranks)], np.int64)
    return builder.extend(
        np.searchsorted(rows.rank[chosen], np.arange(num_ranks + 1)),
        stream,
        lane=lane,
        opcode=opcode,
        stage=rows.stage[chosen],
        version=-1,
        peer=rows.number[chosen],
        num_bytes=num_bytes[chosen],
        group=groups[rows.rank[chosen]],
    )


def _join(first: _Pieces, second: _Pieces) -> _Pieces:
    """Return the pieces of both, rank by rank, those of the first before those of the second."""
    second = second._replace(needed=second.needed + len(first.rank))
    rows = _Pieces(*(np.concatenate(columns) for columns in zip(first, second, strict=True)))
    order = np.argsort(rows.rank, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return _Pieces(
        rank=rows.rank[order],
        stage=rows.stage[order],
        number=rows.number[order],
        num_bytes=rows.num_bytes[order],
        ready=rows.ready[order],
        copied=rows.copied[order],
        needing_seat=rows.needing_seat,
        needed=place[rows.needed],
    )


def _summed(done: ExchangeHandles, plan: Plan, graph: Graph) -> _Pieces:
    """Return the summed pieces, or the rank's shard of them; without buckets of 0 bytes, which only synchronise."""
    rows, held = done.rows, done.held
    assert done.sums is not None
    kept = rows.num_bytes > 0
    place = np.cumsum(kept) - 1
    parts = np.ones(len(rows.rank), np.int64)
    if plan.exchange.shard_optimizer:
        buckets = gradient_buckets(graph, plan)
        shared = np.array([plan.exchange.num_parts(len(bucket.ranks)) for bucket in buckets], np.int64)
        parts = shared[rows.bucket] if len(shared) else parts
    needs = kept[held.row]
    return _Pieces(
        rank=rows.rank[kept],
        stage=rows.stage[kept],
        number=rows.part[kept],
        num_bytes=-(-rows.num_bytes // parts)[kept],
        ready=done.sums[kept],
        copied=np.ones(int(kept.sum()), np.bool_),
        needing_seat=held.seat[needs],
        needed=place[held.row[needs]],
    )


def _unsummed(
    builder: ProgramBuilder,
    computations: Computations,
    done: ExchangeHandles,
    pieces: tuple[HostPiece, ...],
    plan: Plan,
) -> _Pieces:
    """Return the pieces that are in no bucket, on every rank that has their stage."""
    seats, first = done.seats, int(done.rows.part.max(initial=-1)) + 1
    ready = computations.handle[seats.last]
    if plan.exchange.zero >= 2 and done.sums is not None:
        # A bucket of 0 bytes, after the backwards that scatter, shows when everything is scattered.
        meeting = done.rows.num_bytes[done.held.row] == 0
        ready[done.held.seat[meeting]] = done.sums[done.held.row[meeting]]
    rows = [
        (seats.rank[seat], piece.stage, first + place, _own_bytes(piece, plan), ready[seat], seat, piece.index)
        for place, piece in enumerate(pieces)
        for seat in np.flatnonzero(seats.stage == piece.stage).tolist()
    ]
    rank, stage, number, num_bytes, handles, seat, index = np.array(rows, np.int64).reshape(len(rows), 7).T
    if plan.exchange.overlap and plan.exchange.zero < 2:
        handles = builder.mark_each(handles, index)
    return _Pieces(
        rank=rank,
        stage=stage,
        number=number,
        num_bytes=num_bytes,
        ready=handles,
        copied=np.full(len(rows), plan.offload.parameters == "device"),
        needing_seat=seat,
        needed=np.arange(len(rows)),
    )


def _own_bytes(piece: HostPiece, plan: Plan) -> int:
    """Return the bytes of a piece's gradients that one rank copies."""
    return -(-piece.num_bytes // plan.exchange.num_parts(len(plan.stages[piece.stage].ranks)))


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Bytes that one rank needs in host memory and on drives.

    ``resident_bytes``, a part of ``host_bytes``, are allocated before a run begins.
    """

    host_bytes: int
    drive_bytes: int
    resident_bytes: int = 0


# As predicted, and as a run allocates them. For each trained element of the rank's shard (all of them, if replicas do
# not shard states):
#
#     host     its gradient, and its parameter, which is copied up from the same place where there is a master weight;
#              states where they are on the host, else those of `PIECES_AT_HAND` pieces; AdamW's counters
#     drives   states
#
# With parameters on the host, all of them, even frozen ones, are there before a run begins, except those that stages
# share, which are summed in buckets and stay on the devices. With activations on the host, the values that layers save
# for each microbatch in flight are there (`cost.memory.away`).
def count_host_needs(plan: Plan, graph: Graph, rank: int, device: Backend = "cpu") -> HostNeeds:
    """Return the bytes that a rank keeps in host memory and on drives; parameters that its stages share count once.

    ``device``: the backend that computes ("cpu" or a GPU backend); it determines which values are saved for backwards.
    """
    stages, offload = plan.stages_of(rank), plan.offload
    needs = HostNeeds(0, 0) if offload.optimizer == "device" else _count(plan, graph, stages)
    if offload.activations == "device":
        return needs
    return replace(needs, host_bytes=needs.host_bytes + _count_saved(plan, graph, stages, device))


@lru_cache(maxsize=256)
def _count_saved(plan: Plan, graph: Graph, stages: tuple[int, ...], device: Backend) -> int:
    workload, slices = plan.workload, slice_graph(graph, plan.bounds)
    kept = as_kept(graph, workload.numbers, device)
    away = (find_away(kept, slices[i], plan.microbatch_size, workload.float_bytes, device) for i in stages)
    return sum(max_in_flight(plan, i) * item.num_bytes for i, item in zip(stages, away, strict=True))


@lru_cache(maxsize=256)
def _count(plan: Plan, graph: Graph, stages: tuple[int, ...]) -> HostNeeds:
    workload, offload = plan.workload, plan.offload
    numbers, states = workload.numbers, state_bytes(workload.optimizer, workload.precision)
    counter = STEP_COUNTER_BYTES if workload.optimizer.kind == "adamw" else 0
    buckets = gradient_buckets(graph, plan)
    summed = {i: bucket for bucket in buckets for i in bucket.parameters}
    slices = slice_graph(graph, plan.bounds)
    held = {i: stage for stage in reversed(stages) for i in slices[stage].parameters}

    def parts_of(stage: int) -> int:
        return plan.exchange.num_parts(len(plan.stages[stage].ranks))

    # Bytes by the number of ranks among which they are sharded.
    host, drives, resident = Counter[int](), Counter[int](), Counter[int]()
    for i, stage in held.items():
        tensor = graph.tensors[i]
        parts = plan.exchange.num_parts(len(summed[i].ranks)) if i in summed else parts_of(stage)
        value_bytes = tensor.num_bytes(0, numbers.value_bytes)
        is_resident = offload.parameters == "host" and i not in summed
        resident[parts] += value_bytes if is_resident else 0
        if tensor.requires_grad:
            host[parts] += workload.gradient_bytes(tensor) + counter
            host[parts] += 0 if is_resident or numbers.master_bytes else value_bytes
            drives[parts] += tensor.num_elements(0) * states
    kept = _divide(drives)
    if offload.optimizer == "host":
        host += drives
        drives.clear()
    needed = _divide(host) + _divide(resident)
    if offload.optimizer == "nvme":
        # The pieces in the order of the program (`append_host_steps`), which use the buffers in turn.
        pieces = [item for item in host_pieces(graph, plan, buckets) if item.stage in stages]
        shared = [item for item in buckets if not held.keys().isdisjoint(item.parameters)]
        sizes = [-(-item.num_bytes // (numbers.gradient_bytes * parts_of(item.stage))) for item in pieces]
        sizes += [-(-item.num_elements // plan.exchange.num_parts(len(item.ranks))) for item in shared]
        largest = sum(max(sizes[place::PIECES_AT_HAND], default=0) for place in range(PIECES_AT_HAND))
        needed += min(largest * states, kept)
    return HostNeeds(needed, _divide(drives), _divide(resident))


def _divide(num_bytes: Counter[int]) -> int:
    return sum(-(-each // parts) for parts, each in num_bytes.items())
