"""Programs of asynchronous schedules: prologue, a body that repeats, epilogue.

Each program is first built as one run in which the body occurs once, like a synchronous program, and then cut into
sections. The schedule gives the section of each computation. A send or receive is in the section of the computation
that it follows or precedes, an all-reduce in the section of its backward. Waits between sections are omitted: sends and
receives still match by microbatch number (`spec.program`). Other omitted waits only hold receives back until earlier
computations are near their end, so that a few receives are issued early.

A merge (of the hetpipe schedule, which applies a summed wave) may wait for the sum of a wave in another section or
repetition of the body (`find_late_waits`). The prologue has P waves, the body one. A merge waits for the sum of D waves
before its own. Let it be merge i of the section at position x: x = r for repetition r of the body (where i = 0), x = n
for the epilogue after n repetitions. For i < D that sum is

    x + i >= D    the sum of the body, D - i repetitions before
    x + i < D     the sum of wave P + x + i - D of the prologue, which is x + 1 repetitions before

For each of these cases there is a late wait (`spec.program`). For i >= D the sum is in the same section.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket, gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.schedules.asynchronous import BODY, EPILOGUE, PROLOGUE, EndlessOrder, endless_order
from meshwright.program.schedules.seats import join_ranks
from meshwright.program.stage_transfers import Crossings, append_transfers, join_orders
from meshwright.spec import AllReduce, Graph, Opcode, Plan, PlanError, Program, Section, StageSlice, content_hash
from meshwright.spec.exchange import WAVES
from meshwright.spec.instructions import COMPUTATIONS

Ids = NDArray[np.int64]


def build_endless(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...], crossings: Crossings) -> Program:
    """Return the program of a plan with an asynchronous schedule.

    Raises PlanError if several stages share a trained parameter, because they would update it at different times.
    """
    _check_ties(plan, graph, stages)
    orders = [_without(endless_order(plan, rank), stages, graph) for rank in range(plan.num_ranks)]
    builder = ProgramBuilder(plan.num_ranks)
    handles = builder.extend(
        np.cumsum([0, *map(len, orders)]),
        "compute",
        opcode=np.concatenate([order.opcode for order in orders]),
        stage=np.repeat([order.stage for order in orders], [len(order) for order in orders]),
        microbatch=np.concatenate([order.microbatch for order in orders]),
        version=np.concatenate([order.version for order in orders]),
    )
    computes = np.concatenate([np.isin(order.opcode, COMPUTATIONS) for order in orders])
    ordered = join_ranks(order.computations() for order in orders)
    append_transfers(builder, join_orders(plan, ordered, handles[computes]), crossings)
    _append_exchange(builder, plan, graph, orders, handles)
    program = builder.build(schedule=plan.schedule, plan_hash=content_hash(plan))
    part = _place(program, np.concatenate([order.section for order in orders]))
    prologue, body, epilogue = _cut(program, part, find_late_waits(program, part, plan.exchange.staleness))
    return replace(program, prologue=prologue, body=body, epilogue=epilogue, advance=plan.num_microbatches)


def _check_ties(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...]) -> None:
    holders: dict[int, list[int]] = {}
    for stage in stages:
        for parameter in stage.parameters:
            if graph.tensors[parameter].requires_grad:
                holders.setdefault(parameter, []).append(stage.index)
    shared = next(((i, held) for i, held in holders.items() if len(held) > 1), None)
    if shared is not None:
        raise PlanError(
            f"Under the schedule {plan.schedule}, stages update their weights at different times, but stages "
            f"{shared[1]} share the parameter {graph.tensors[shared[0]].name!r}, and their copies would differ. Choose "
            "a synchronous schedule, or cut the model so that one stage has all uses of the parameter."
        )


def _without(order: EndlessOrder, stages: tuple[StageSlice, ...], graph: Graph) -> EndlessOrder:
    """Drop backwards, updates and copies that the stage does not need; without training everything is version 0."""
    stage = stages[order.stage]
    if stage.has_backward and any(graph.tensors[i].requires_grad for i in stage.parameters):
        return order
    kept = order.opcode == Opcode.FORWARD
    if stage.has_backward:
        kept |= order.opcode == Opcode.BACKWARD
    columns = {name: getattr(order, name)[kept] for name in ("opcode", "microbatch", "section")}
    return replace(order, version=np.zeros(int(kept.sum()), np.int32), **columns)


def _append_exchange(
    builder: ProgramBuilder, plan: Plan, graph: Graph, orders: list[EndlessOrder], handles: Ids
) -> None:
    """Append sums of the replicas' gradients before each update, or of a wave's updates before each merge."""
    buckets = gradient_buckets(graph, plan)
    first = 0
    for rank, order in enumerate(orders):
        own = handles[first : first + len(order)]
        first += len(order)
        held = [bucket for bucket in buckets if order.stage in bucket.stages]
        if not held:
            continue
        steps = np.flatnonzero(order.opcode == Opcode.OPTIMIZER_STEP)
        if plan.schedule == WAVES:
            wave = plan.num_microbatches // len(plan.stages[order.stage].ranks)
            merges = own[order.opcode == Opcode.MERGE].tolist()
            for number, step in enumerate(own[steps[wave - 1 :: wave]].tolist()):
                sums = [_sum_up(builder, rank, order.stage, step, bucket) for bucket in held]
                # The last waves have no merge.
                for merge in merges[number : number + 1]:
                    builder.wait_each(np.full(len(sums), merge), np.array(sums))
            continue
        backwards = np.flatnonzero(order.opcode == Opcode.BACKWARD)
        last = backwards[np.searchsorted(backwards, steps) - 1]
        for step, backward in zip(own[steps].tolist(), own[last].tolist(), strict=True):
            for bucket in held:
                ready = builder.mark(backward, bucket.index) if plan.exchange.overlap else backward
                builder.wait(step, _sum_up(builder, rank, order.stage, ready, bucket))


def _sum_up(builder: ProgramBuilder, rank: int, stage: int, ready: int, bucket: Bucket) -> int:
    item = AllReduce(stage=stage, bucket=bucket.index, num_bytes=bucket.num_bytes)
    return builder.append(rank, "exchange", item, group=bucket.ranks, waits=(ready,))


def _cut(program: Program, part: NDArray[np.int8], late: LateWaits) -> tuple[Section, Section, Section]:
    """Cut the program's body into three sections; ``part`` gives the section of each instruction."""
    whole = program.body
    place = np.empty(whole.num_instructions, np.int64)
    stream = np.repeat(np.arange(len(program.streams)), np.diff(whole.stream_offsets))
    waiter = np.repeat(np.arange(whole.num_instructions), np.diff(whole.wait_offsets))
    awaited = np.concatenate([np.arange(whole.num_instructions), whole.mark_instruction])[whole.waits]
    sections = []
    for number in (PROLOGUE, BODY, EPILOGUE):
        chosen = np.flatnonzero(part == number)
        place[chosen] = np.arange(len(chosen))
        waiting = part[late.waiting] == number
        marks = np.flatnonzero(part[whole.mark_instruction] == number)
        new = np.full(whole.num_instructions + len(whole.mark_instruction), -1)
        new[chosen] = np.arange(len(chosen))
        new[whole.num_instructions + marks] = len(chosen) + np.arange(len(marks))
        waits = (part[waiter] == number) & (part[awaited] == number)
        counts = np.bincount(new[waiter[waits]], minlength=len(chosen))
        columns = ("opcode", "stage", "microbatch", "version", "peer", "group", "num_bytes")
        sections.append(
            Section(
                stream_offsets=np.searchsorted(stream[chosen], np.arange(len(program.streams) + 1)).astype(np.int64),
                **{name: getattr(whole, name)[chosen] for name in columns},
                wait_offsets=np.append(0, np.cumsum(counts)).astype(np.int64),
                waits=new[whole.waits[waits]],
                mark_instruction=new[whole.mark_instruction[marks]],
                mark_index=whole.mark_index[marks],
                late_instruction=place[late.waiting[waiting]],
                late_section=part[late.awaited[waiting]],
                late_awaited=place[late.awaited[waiting]],
                late_lag=late.lag[waiting],
            )
        )
    return sections[0], sections[1], sections[2]


def _place(program: Program, computed_in: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return the section of each instruction: as given for computations, else that of the computation it belongs to."""
    whole = program.body
    names = np.array([stream.name for stream in program.streams])
    name = np.repeat(names, np.diff(whole.stream_offsets))
    is_computed = name == "compute"
    part = np.full(whole.num_instructions, -1, np.int8)
    part[is_computed] = computed_in
    waiter = np.repeat(np.arange(whole.num_instructions), np.diff(whole.wait_offsets))
    awaited = np.concatenate([np.arange(whole.num_instructions), whole.mark_instruction])[whole.waits]
    after = is_computed[awaited] & np.isin(name[waiter], ("send", "exchange"))
    part[waiter[after]] = part[awaited[after]]
    before = is_computed[waiter] & (name[awaited] == "receive")
    part[awaited[before]] = part[waiter[before]]
    return part


class LateWaits(NamedTuple):
    """Waits across repetitions of the body, as columns of shape (n,).

    ``waiting`` and ``awaited`` are instruction ids of the program in which the body occurs once; ``lag`` is the number
    of repetitions between them.
    """

    waiting: Ids
    awaited: Ids
    lag: NDArray[np.int32]


def find_late_waits(program: Program, part: NDArray[np.int8], staleness: int) -> LateWaits:
    """Return which merges wait for gradient sums of an earlier repetition of the body; none if ``staleness`` is 0.

    A merge (`spec.Merge`) adds the weight changes of the other replicas, which an exchange has summed.

    ``program`` has the body once, not yet cut into sections; ``part`` is the section of each of its instructions.
    """
    whole, found = program.body, [np.zeros((0, 3), np.int64)]
    compute: Ids = np.zeros(0, np.int64)
    for number, stream in enumerate(program.streams if staleness else ()):
        ids = np.array(whole.stream_range(number), np.int64)
        if stream.name == "compute":
            compute = ids
        elif stream.name == "exchange":
            merges = compute[(whole.opcode[compute] == Opcode.MERGE) & (part[compute] > PROLOGUE)]
            sums = ids.reshape(-1, int((part[ids] == BODY).sum()))
            found += _of_rank(merges, sums, int((part[sums[:, 0]] == PROLOGUE).sum()), staleness)
    waiting, awaited, lag = np.concatenate(found).T
    return LateWaits(waiting, awaited, lag.astype(np.int32))


def _of_rank(merges: Ids, sums: Ids, num_prologue: int, staleness: int) -> Iterator[Ids]:
    """Yield rows (waiting, awaited, lag) for the merges of body and epilogue; ``sums`` has shape (waves, buckets)."""
    for merge, i in zip(merges.tolist(), [0, *range(staleness)], strict=False):
        cases = [(num_prologue, staleness - i)] if i < staleness else []
        cases += [(num_prologue + place + i - staleness, place + 1) for place in range(staleness - i)]
        for wave, lag in cases:
            yield np.array([(merge, awaited, lag) for awaited in sums[wave].tolist()], np.int64)
