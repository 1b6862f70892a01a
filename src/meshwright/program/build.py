"""Build the program of a plan (`build_program`): computations, transfers, gradient reduction and optimizer steps.

Each rank has several streams. `compute` runs the schedule's computations and, at the end, the optimizer; `send` and
`receive` move the tensors that cross between stages on different ranks (`spec.slices` finds these tensors,
`stage_transfers` decides when they move); `exchange` sums gradients. `repeat_body` unrolls several steps,
`reach_across` lets the gradient reduction of one step overlap the next step.

The input pipeline is a bounded queue: each rank that reads inputs of the graph has a loader, which fills a queue of
depth q with one microbatch after the other. The loader works asynchronously, at its own rate, until the queue is full:
it starts microbatch k when microbatch k - q has finished its forward, in this step or an earlier one. A forward waits
for its microbatch. So a slow loader stalls the device, and a slow device stalls the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.endless_program import build_endless
from meshwright.program.gradient_exchange import append_exchange, find_trained
from meshwright.program.host_offload import append_host_steps, append_saved, host_pieces
from meshwright.program.order_bounds import Order
from meshwright.program.order_files import OrderFile
from meshwright.program.orders import compute_orders, named_orders
from meshwright.program.own_schedules import OwnSchedule, find_schedule
from meshwright.program.pipeline_folding import Fold, folded_buckets
from meshwright.program.plan_lowering import lower_plan
from meshwright.program.program_check import play_orders, without_backwards
from meshwright.program.schedules import RankOrders
from meshwright.program.schedules.seats import join_ranks
from meshwright.program.stage_transfers import Computations, Crossings, append_orders, append_transfers, find_crossings
from meshwright.spec import (
    Graph,
    Opcode,
    Plan,
    PlanError,
    Program,
    ScheduleError,
    Section,
    StageSlice,
    check_plan,
    content_hash,
    slice_graph,
)
from meshwright.spec.instructions import UPDATES

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repeated:
    """An unrolled program: one section of n instructions and m marks, and where each of them comes from.

    ``source`` (n,) and ``mark_source`` (m,) are row numbers in the concatenated columns of prologue, body and epilogue.
    ``step`` (n,) is the repetition of the body, from 0; the prologue has the number of the first repetition, the
    epilogue that of the last.
    """

    section: Section
    source: Ids
    mark_source: Ids
    step: NDArray[np.int32]


def repeat_body(program: Program, num_steps: int) -> Repeated:
    """Return prologue, ``num_steps`` repetitions of the body, and epilogue as one section.

    Microbatch and version numbers increase with each repetition. Late waits (for instructions of an earlier
    repetition, see `spec.program`) become ordinary waits.
    """
    made = [section for _, section in program.sections()]
    which = [0, *[1] * num_steps, 2]
    steps = [0, *range(num_steps), num_steps - 1]
    parts = [made[index] for index in which]
    lengths = np.array([np.diff(part.stream_offsets) for part in parts])
    stream_offsets = np.concatenate([[0], np.cumsum(lengths.sum(axis=0))])
    begins = stream_offsets[:-1] + np.cumsum(lengths, axis=0) - lengths
    new = [
        np.arange(part.num_instructions) + np.repeat(begin - part.stream_offsets[:-1], length)
        for part, begin, length in zip(parts, begins, lengths, strict=True)
    ]
    order = np.argsort(np.concatenate(new), kind="stable")
    source = _behind_each_other(which, [part.num_instructions for part in made])[order]
    mark_source = _behind_each_other(which, [len(part.mark_instruction) for part in made])
    step = np.repeat(np.array(steps, np.int32), [part.num_instructions for part in parts])[order]
    columns = ("opcode", "stage", "microbatch", "version", "peer", "group", "num_bytes")
    facts: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in made])[source] for name in columns}
    updates = _updates_per_body(program, int(facts["stage"].max(initial=0)) + 1) if program.advance else np.zeros(1)
    for name, advance in (("microbatch", program.advance), ("version", updates[facts["stage"] % len(updates)])):
        counted = facts[name] + (step * advance).astype(np.int32)
        facts[name] = np.where(facts[name] < 0, facts[name], counted)
    section = Section(
        stream_offsets=stream_offsets.astype(np.int64),
        **facts,
        **_waits(parts, new),
        mark_instruction=np.concatenate([ids[part.mark_instruction] for ids, part in zip(new, parts, strict=True)]),
        mark_index=np.concatenate([part.mark_index for part in parts]),
        **_joins(parts, new),
    )
    return Repeated(section=section, source=source, mark_source=mark_source, step=step)


def _behind_each_other(which: list[int], counts: list[int]) -> Ids:
    first = np.cumsum([0, *counts])
    return np.concatenate([np.arange(first[k], first[k + 1]) for k in which])


def _updates_per_body(program: Program, num_stages: int) -> Ids:
    """Return the number of weight versions that a repetition of the body makes for each stage."""
    body = program.body
    steps = np.flatnonzero(np.isin(body.opcode, UPDATES))
    streams = np.repeat(np.arange(len(program.streams)), np.diff(body.stream_offsets))[steps]
    made = np.bincount(body.stage[steps], minlength=num_stages)
    pairs = np.unique(np.stack([streams, body.stage[steps]]), axis=1)
    replicas: Ids = np.bincount(pairs[1], minlength=num_stages)
    return made // np.maximum(replicas, 1)


def _waits(parts: list[Section], new: list[Ids]) -> dict[str, Any]:
    num_instructions, num_marks = sum(len(ids) for ids in new), 0
    awaited, waiting = [], []
    for place, (part, ids) in enumerate(zip(parts, new, strict=True)):
        marks = num_instructions + num_marks + np.arange(len(part.mark_instruction))
        awaited.append(np.concatenate([ids, marks])[part.waits])
        waiting.append(np.repeat(ids, np.diff(part.wait_offsets)))
        num_marks += len(part.mark_instruction)
        for lag in np.unique(part.late_lag).tolist():
            if 0 <= place - lag < len(parts) - 1:
                meant = (part.late_lag == lag) & (part.late_section == min(place - lag, 1))
                awaited.append(new[place - lag][part.late_awaited[meant]])
                waiting.append(ids[part.late_instruction[meant]])
    waiters = np.concatenate(waiting)
    return {
        "wait_offsets": np.append(0, np.cumsum(np.bincount(waiters, minlength=num_instructions))).astype(np.int64),
        "waits": np.concatenate(awaited)[np.argsort(waiters, kind="stable")].astype(np.int64),
    }


def _joins(parts: list[Section], new: list[Ids]) -> dict[str, Any]:
    joins = np.concatenate([ids[part.join_instruction] for part, ids in zip(parts, new, strict=True)])
    order = np.argsort(joins)
    return {"join_instruction": joins[order], "join_need": np.concatenate([part.join_need for part in parts])[order]}


# In a synchronous program, all sums are awaited at the end of a step. ByteScheduler crosses that barrier: the next
# forward of a layer waits for the parameters of that layer alone. Here each optimizer step moves before the first
# forward of its stage in the next step, and has late waits for the sums of the step before. So the first step is a
# prologue without updates, and an epilogue makes the last updates; one repetition of the body is one step, from update
# to backward. Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP
# 2019), section 3.3.
def reach_across(program: Program) -> Program:
    """Move each optimizer step to the next step, before its stage's first forward, so that sums overlap that step.

    The returned program makes its last updates in the epilogue. A program without updates is returned unchanged.
    """
    body = program.body
    updates = np.flatnonzero(body.opcode == Opcode.OPTIMIZER_STEP)
    if not len(updates):
        return program
    stream = np.repeat(np.arange(len(program.streams)), np.diff(body.stream_offsets))
    place = np.arange(body.num_instructions, dtype=np.float64)
    place[updates] = _first_forwards(body, stream)[stream[updates], body.stage[updates]] - 0.5
    order = np.lexsort((place, stream))
    stays = body.opcode != Opcode.OPTIMIZER_STEP
    first = _select(body, np.flatnonzero(stays), stream)
    whole, last = _select(body, order, stream), _select(body, updates, stream)
    # Waits for sums become waits for those of the step before: for the prologue's in the first repetition.
    waiting = np.repeat(np.arange(body.num_instructions), np.diff(body.wait_offsets))
    late = np.flatnonzero(~stays[waiting])
    sums = _Late(waiting[late], body.waits[late], np.ones(len(late), np.int32))
    known = _Late(body.late_instruction, body.late_awaited, body.late_lag)
    both = _Late(
        np.concatenate([sums.waiting, known.waiting]),
        np.concatenate([sums.awaited, known.awaited]),
        np.concatenate([sums.lag, known.lag]),
    )
    return replace(
        program,
        prologue=first,
        body=_wait_late(whole, order, both, (np.flatnonzero(stays), order)),
        epilogue=_wait_late(last, updates, sums, (None, order)),
    )


class _Late(NamedTuple):
    """Waiting and awaited instructions, and the lag in repetitions: rows of the body, shape (n,)."""

    waiting: Ids
    awaited: Ids
    lag: NDArray[np.int32]


def _first_forwards(body: Section, stream: Ids) -> Ids:
    """Return the row of the first forward of each stage on each stream, shape (streams, stages)."""
    forwards = np.flatnonzero(body.opcode == Opcode.FORWARD)
    found = np.zeros((int(stream.max()) + 1, int(body.stage.max()) + 1), np.int64)
    found[stream[forwards[::-1]], body.stage[forwards[::-1]]] = forwards[::-1]
    return found


def _places(rows: Ids, count: int) -> Ids:
    """Return the index of each of ``count`` rows among the chosen ones, -1 for the others."""
    places = np.full(count, -1, np.int64)
    places[rows] = np.arange(len(rows))
    return places


def _select(body: Section, rows: Ids, stream: Ids) -> Section:
    """Return a section of some rows, in their order, with their waits for each other, except those of updates."""
    count = body.num_instructions
    marks = np.flatnonzero(np.isin(body.mark_instruction, rows))
    places = np.concatenate([_places(rows, count), np.full(len(body.mark_instruction), -1)])
    places[count + marks] = len(rows) + np.arange(len(marks))
    waiting = np.repeat(np.arange(count), np.diff(body.wait_offsets))
    kept = np.flatnonzero(
        (places[waiting] >= 0) & (places[body.waits] >= 0) & (body.opcode[waiting] != Opcode.OPTIMIZER_STEP)
    )
    kept = kept[np.argsort(places[waiting[kept]], kind="stable")]
    counts = np.bincount(places[waiting[kept]], minlength=len(rows))
    columns = ("opcode", "stage", "microbatch", "version", "peer", "group", "num_bytes")
    return Section(
        stream_offsets=np.searchsorted(stream[rows], np.arange(len(body.stream_offsets))).astype(np.int64),
        **{name: getattr(body, name)[rows] for name in columns},
        wait_offsets=np.append(0, np.cumsum(counts)).astype(np.int64),
        waits=places[body.waits[kept]],
        mark_instruction=places[body.mark_instruction[marks]],
        mark_index=body.mark_index[marks],
    )


def _wait_late(section: Section, rows: Ids, late: _Late, earlier: tuple[Ids | None, Ids]) -> Section:
    """Return the section with late waits, in rows of the old body, for the sections of the ``earlier`` rows."""
    count = 1 + max(int(chosen.max(initial=0)) for chosen in (rows, *late[:2], *earlier) if chosen is not None)
    known = [(number, _places(chosen, count)) for number, chosen in enumerate(earlier) if chosen is not None]
    return replace(
        section,
        late_instruction=np.concatenate([_places(rows, count)[late.waiting] for _ in known]),
        late_section=np.concatenate([np.full(len(late.waiting), number, np.int8) for number, _ in known]),
        late_awaited=np.concatenate([places[late.awaited] for _, places in known]),
        late_lag=np.tile(late.lag, len(known)),
    )


def build_program(plan: Plan, graph: Graph) -> Program:
    """Return the program of a plan. If the plan splits ops or recomputes, stages are cut from its lowered graph.

    (`plan_lowering.lower_plan` makes that graph.) Raises PlanError if the plan does not match the graph or its
    schedule. For a user's own schedule, raises ScheduleReferenceError if its file or function changed, ScheduleError
    if it breaks a rule, and DeadlockError if its ranks wait for each other in a cycle.
    """
    if plan.exchange.policy:
        raise PlanError(
            f"The exchange policy {plan.exchange.policy} decides in the run which instructions follow, so the plan has "
            "no fixed program. `meshwright simulate` shows a run."
        )
    local_plan, local_graph = lower_plan(plan, graph)
    program = _build_program(local_plan, local_graph, find_schedule(plan), None)
    return program if local_plan is plan else replace(program, plan_hash=content_hash(plan))


def build_folded_program(fold: Fold, graph: Graph) -> Program:
    """Return the program of ``fold.plan``, one pipeline of many, with the gradient sums of the whole plan.

    Raises the same errors as `build_program`.
    """
    return _build_program(fold.plan, graph, find_schedule(fold.plan), fold)


@lru_cache(maxsize=16)
def _build_program(
    plan: Plan,
    graph: Graph,
    schedule: OwnSchedule | OrderFile | None,  # noqa: ARG001 - part of the cache key
    fold: Fold | None,
) -> Program:
    check_plan(plan, graph)
    stages = slice_graph(graph, plan.bounds)
    crossings = find_crossings(plan, graph, stages)
    if plan.is_asynchronous:
        return build_endless(plan, graph, stages, crossings)
    orders = _orders(plan, graph, stages, crossings)
    builder = ProgramBuilder(plan.num_devices)
    num_steps, written = plan.exchange.every_steps, list[Computations]()
    for step in range(num_steps):
        computations = append_orders(builder, plan, orders.later(step * _microbatches_apart(plan)))
        append_transfers(builder, computations, crossings)
        written.append(computations)
        if plan.offload.activations == "host":
            append_saved(builder, computations, stages, plan, graph)
        if graph.mode == "training":
            buckets = folded_buckets(fold, graph) if fold else gradient_buckets(graph, plan)
            exchanged = buckets if step == num_steps - 1 else ()
            trained = find_trained(graph, stages)
            numbers = plan.workload.numbers
            agreed = plan.exchange.clip_norm + plan.scales_loss
            done = append_exchange(
                builder, computations, trained, exchanged, plan.exchange, numbers, agreed, written[0]
            )
            if plan.offload.optimizer != "device":
                pieces = host_pieces(graph, plan, buckets)
                append_host_steps(builder, computations, done, pieces, fold.whole if fold else plan, graph)
    if plan.workload.loader is not None:
        append_loads(builder, written, stages, plan.workload.loader.depth)
    program = builder.build(schedule=plan.schedule, plan_hash=content_hash(plan))
    return reach_across(program) if plan.exchange.across_steps else replace(program, body_steps=num_steps)


def _microbatches_apart(plan: Plan) -> int:
    """Offset between the microbatch numbers of two steps of one body; equal numbers go to the same replica."""
    period = lcm(*(len(stage.turns) for stage in plan.stages))
    return -(-plan.num_microbatches // period) * period


def forget_programs() -> None:
    """Clear the cache of `build_program`, so that a test can time the building of a program."""
    _build_program.cache_clear()


def _orders(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...], crossings: Crossings) -> RankOrders:
    """Return what every rank computes; a user's schedule is checked against this graph first."""
    differentiated = np.array([stage.has_backward for stage in stages])
    if not plan.has_own_schedule:
        named = named_orders(plan)
        if differentiated.all():
            return named
        return named.select((named.columns.opcode == Opcode.FORWARD) | differentiated[named.columns.stage])
    orders = compute_orders(plan)
    for order in orders:
        for stage in plan.stages_of(order.rank):
            _check_written_buffers(plan, graph, stages[stage], order)
    if not differentiated.all():
        orders = tuple(without_backwards(order, differentiated) for order in orders)
    play_orders(plan, orders, crossings.needs)
    return join_ranks(order.columns for order in orders)


def _check_written_buffers(plan: Plan, graph: Graph, stage: StageSlice, order: Order) -> None:
    """Raise ScheduleError if a stage that updates running statistics runs forwards out of microbatch order.

    In another order than that of the microbatches, training would give another result.
    """
    columns = order.columns
    forwards = np.flatnonzero((columns.opcode == Opcode.FORWARD) & (columns.stage == stage.index)).tolist()
    late = next((b for a, b in pairwise(forwards) if columns.microbatch[b] < columns.microbatch[a]), None)
    buffers = set(stage.buffers)
    writers = (graph.ops[op] for op in stage.ops if graph.ops[op].writes_buffers)
    writer = next((op for op in writers if not buffers.isdisjoint(op.inputs)), None)
    if late is not None and writer is not None:
        raise ScheduleError(
            f"{plan.schedule} runs the forward of microbatch {int(columns.microbatch[late])} on stage {stage.index} "
            f"after that of a later one{order.where(plan, late)}, but {writer.module or writer.name} of that stage "
            "updates its running statistics in every forward, so the result would differ from training in one process. "
            "Run the forwards of this stage in the order of the microbatches."
        )


def append_loads(
    builder: ProgramBuilder, computations: Sequence[Computations], stages: tuple[StageSlice, ...], depth: int
) -> None:
    """Append the loads of input microbatches for all steps of a body, and the waits for them.

    ``computations`` has one entry per step, ``depth`` is the length of each rank's queue in microbatches.
    """
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
