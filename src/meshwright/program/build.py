"""Plan → Program: the order of the schedule, completed by transfers, gradient reduction and the optimizer.

For each rank: `compute` runs the schedule's computations and, at the end, the optimizer; `send` and `receive` move the
tensors that cross between stages on different ranks (`spec.slices` finds them, `transfers` decides when); `exchange`
sums gradients.

The input pipeline is a bounded queue: each rank that reads inputs of the graph has a loader, which fills a queue of
depth q with one microbatch after the other. The loader works asynchronously, at its own rate, until the queue is full:
it starts microbatch k when microbatch k - q has finished its forward, in this step or an earlier one. A forward waits
for its microbatch. So a slow loader stalls the device, and a slow device stalls the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.traits import operator_name
from meshwright.program.across_steps import reach_across
from meshwright.program.buckets import gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.crossings import Crossings, append_orders, append_transfers, find_crossings
from meshwright.program.endless import build_endless
from meshwright.program.exchange import append_exchange, find_trained
from meshwright.program.folding import Fold, folded_buckets
from meshwright.program.lowering import lower_plan
from meshwright.program.offload import append_host_steps, host_pieces
from meshwright.program.order import Order
from meshwright.program.order_files import OrderFile
from meshwright.program.orders import compute_orders, named_orders
from meshwright.program.own_schedules import OwnSchedule, find_schedule
from meshwright.program.progress import play_orders, without_backwards
from meshwright.program.saved import append_saved
from meshwright.program.schedules import RankOrders
from meshwright.program.schedules.columns import join_ranks
from meshwright.program.transfers import Computations
from meshwright.spec.codec import content_hash
from meshwright.spec.errors import ScheduleError
from meshwright.spec.graph import Graph, Op
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.program import Program
from meshwright.spec.slices import StageSlice, slice_graph


def build_program(plan: Plan, graph: Graph) -> Program:
    """Return the program of a plan; if the plan splits ops or recomputes, that of its local graph (`lowering`).

    Raises PlanError if the plan does not match the graph or its schedule; ScheduleReferenceError, ScheduleError or
    DeadlockError if its own schedule changed, breaks a rule, or makes ranks wait for each other in a cycle.
    """
    local_plan, local_graph = lower_plan(plan, graph)
    program = _build_program(local_plan, local_graph, find_schedule(plan), None)
    return program if local_plan is plan else replace(program, plan_hash=content_hash(plan))


def build_folded_program(fold: Fold, graph: Graph) -> Program:
    """Return the program of ``fold.plan``, with the gradient sums of the whole plan. Raises as `build_program`."""
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
    """Clear the cache of built programs, so that building one can be timed."""
    _build_program.cache_clear()


def _orders(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...], crossings: Crossings) -> RankOrders:
    """Return what every rank computes; an own schedule is checked against this graph first."""
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
    writer = next((graph.ops[op] for op in stage.ops if _writes_buffer(graph.ops[op], stage)), None)
    if late is not None and writer is not None:
        raise ScheduleError(
            f"{plan.schedule} runs the forward of microbatch {int(columns.microbatch[late])} on stage {stage.index} "
            f"after that of a later one{order.where(plan, late)}, but {writer.module or writer.name} of that stage "
            "updates its running statistics in every forward, so the result would not be that of one process. Run the "
            "forwards of such stages in the order of the microbatches."
        )


def _writes_buffer(op: Op, stage: StageSlice) -> bool:
    """Whether an op is batch normalisation, or in place (torch's name ends with an underscore), on a buffer."""
    return ("batch_norm" in operator_name(op) or op.is_in_place) and not set(stage.buffers).isdisjoint(op.inputs)


Ids = NDArray[np.int64]


def append_loads(
    builder: ProgramBuilder, computations: Sequence[Computations], stages: tuple[StageSlice, ...], depth: int
) -> None:
    """Append the loads of all steps of a body; ``computations`` holds one entry per step."""
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
