"""Plan → Program: the schedule's order, completed by transfers, gradient exchange and the optimizer.

For each rank: `compute` runs the schedule's computations and, at the end, the optimizer; `send` and `receive` move what
crosses between stages on different ranks (`spec.slices` says what, `transfers` when), `exchange` sums gradients.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket, gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.crossings import Crossings, append_orders, append_transfers, find_crossings
from meshwright.program.endless import build_endless
from meshwright.program.folding import Fold, folded_buckets
from meshwright.program.order import Order
from meshwright.program.order_files import OrderFile
from meshwright.program.orders import compute_orders
from meshwright.program.own_schedules import OwnSchedule, find_schedule
from meshwright.program.progress import play_orders, without_backwards
from meshwright.program.schedules import OrderColumns
from meshwright.program.transfers import Computations
from meshwright.spec.codec import content_hash
from meshwright.spec.errors import ScheduleError
from meshwright.spec.graph import Graph, Op
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.program import Program
from meshwright.spec.slices import StageSlice, slice_graph

Ids = NDArray[np.int64]


def build_program(plan: Plan, graph: Graph) -> Program:
    """The program of a plan.

    Raises PlanError if the plan does not fit the graph or its schedule; ScheduleReferenceError, ScheduleError or
    DeadlockError for an own schedule that changed, breaks a rule, or lets ranks wait in a circle.
    """
    return _build_program(plan, graph, find_schedule(plan), None)


def build_folded_program(fold: Fold, graph: Graph) -> Program:
    """The program of ``fold.plan``, with the sums of gradients of the whole plan. Raises as `build_program`."""
    return _build_program(fold.plan, graph, find_schedule(fold.plan), fold)


@lru_cache(maxsize=16)
def _build_program(
    plan: Plan,
    graph: Graph,
    schedule: OwnSchedule | OrderFile | None,  # noqa: ARG001 - part of the key
    fold: Fold | None,
) -> Program:
    check_plan(plan, graph)
    stages = slice_graph(graph, plan.bounds)
    crossings = find_crossings(plan, graph, stages)
    if plan.is_asynchronous:
        return build_endless(plan, graph, stages, crossings)
    orders = _orders(plan, graph, stages, crossings)
    builder = ProgramBuilder(plan.num_ranks)
    computations, computed = append_orders(builder, plan, orders)
    append_transfers(builder, plan, computations, computed, crossings)
    if graph.mode == "training":
        buckets = folded_buckets(fold, graph) if fold else gradient_buckets(graph, plan)
        _append_exchange_and_steps(builder, plan, graph, stages, computations, computed, buckets)
    return builder.build(schedule=plan.schedule, plan_hash=content_hash(plan))


def forget_programs() -> None:
    """Drop the programs that were kept, so that building one can be timed."""
    _build_program.cache_clear()


def _orders(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...], crossings: Crossings) -> tuple[OrderColumns, ...]:
    """What every rank computes; an own schedule is checked against this graph first."""
    orders = compute_orders(plan)
    differentiated = np.array([stage.has_backward for stage in stages])
    if plan.has_own_schedule:
        for order in orders:
            for stage in plan.stages_of(order.rank):
                _check_written_buffers(plan, graph, stages[stage], order)
    if not differentiated.all():
        orders = tuple(without_backwards(order, differentiated) for order in orders)
    if plan.has_own_schedule:
        play_orders(plan, orders, crossings.needs)
    return tuple(order.columns for order in orders)


def _check_written_buffers(plan: Plan, graph: Graph, stage: StageSlice, order: Order) -> None:
    """Running statistics follow the forwards: in another order than the microbatches', training would differ."""
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
    """Batch normalisation, or an operator in place (torch ends its name with an underscore), on a buffer."""
    name = op.kind.split(".")[1] if op.kind.count(".") else op.kind
    return ("batch_norm" in name or name.endswith("_")) and not set(stage.buffers).isdisjoint(op.inputs)


def _append_exchange_and_steps(
    builder: ProgramBuilder,
    plan: Plan,
    graph: Graph,
    stages: tuple[StageSlice, ...],
    computations: Computations,
    computed: Ids,
    buckets: tuple[Bucket, ...],
) -> None:
    """After (or, with overlap, inside) the last backward of a stage its gradients are summed, then comes its step."""
    held: list[list[int]] = [[] for _ in stages]
    for bucket in buckets:
        for index in bucket.stages:
            held[index].append(bucket.index)
    trained = {stage.index for stage in stages if any(graph.tensors[item].requires_grad for item in stage.parameters)}
    releasing = (computations.opcode == Opcode.BACKWARD) | (computations.opcode == Opcode.BACKWARD_WEIGHT)
    steps: list[tuple[int, int]] = []
    sums: list[tuple[int, int, int, int]] = []
    awaited: list[tuple[int, int]] = []
    for rank in range(plan.num_ranks):
        begin, end = computations.offsets[rank : rank + 2].tolist()
        ends = begin + np.flatnonzero(releasing[begin:end])[::-1]
        found, place = np.unique(computations.stage[ends], return_index=True)
        last = dict(zip(found.tolist(), computed[ends[place]].tolist(), strict=True))
        step_of = {stage: len(steps) + k for k, stage in enumerate(filter(trained.__contains__, plan.stages_of(rank)))}
        steps += [(rank, stage) for stage in step_of]
        for index in sorted({index for stage in step_of for index in held[stage]}):
            # A parameter that several stages of a rank share is summed once, when all its gradients are there.
            own = [stage for stage in buckets[index].stages if stage in step_of]
            latest = max(own, key=last.__getitem__)
            awaited += [(step_of[stage], len(sums)) for stage in own]
            sums.append((rank, latest, index, last[latest]))
    ranks, summed, indices, ready = np.array(sums, np.int64).reshape(-1, 4).T
    handles = builder.extend(
        ranks,
        "exchange",
        opcode=Opcode.ALL_REDUCE,
        stage=summed,
        version=-1,
        peer=indices,
        num_bytes=np.array([bucket.num_bytes for bucket in buckets], np.int64)[indices],
        group=np.array([builder.group(bucket.ranks) for bucket in buckets], np.int64)[indices],
    )
    builder.wait_each(handles, builder.mark_each(ready, indices) if plan.exchange.overlap else ready)
    stepping = np.array(steps, np.int64).reshape(-1, 2).T
    stepped = builder.extend(stepping[0], "compute", opcode=Opcode.OPTIMIZER_STEP, stage=stepping[1])
    waiting, waited = np.array(awaited, np.int64).reshape(-1, 2).T
    builder.wait_each(stepped[waiting], handles[waited])
