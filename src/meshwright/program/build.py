"""Plan → Program: the schedule's order, completed by transfers, gradient exchange and the optimizer.

For each rank: `compute` runs the schedule's computations and, at the end, the optimizer; `send` and `receive` move what
crosses between stages on different ranks (`spec.slices` says what, `transfers` when), `exchange` sums gradients.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket, gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.folding import Fold, folded_buckets
from meshwright.program.orders import Order, compute_orders
from meshwright.program.own_schedules import OwnSchedule, find_schedule
from meshwright.program.progress import play_orders, without_backwards
from meshwright.program.schedules import OrderColumns
from meshwright.program.transfers import Computations, Routes, lay_out_transfers
from meshwright.spec.codec import content_hash
from meshwright.spec.errors import ScheduleError
from meshwright.spec.graph import Graph, Op
from meshwright.spec.instructions import AllReduce, Opcode, OptimizerStep
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.program import Program
from meshwright.spec.slices import StageSlice, slice_graph

Ids = NDArray[np.int64]


class _Crossings(NamedTuple):
    """What crosses between stages: its routes, and of each route its bytes and whether it carries gradients."""

    routes: Routes
    num_bytes: Ids
    is_gradient: NDArray[np.bool_]

    def needs(self, backward: bool, stage: int) -> list[int]:
        """The stages that must have computed a microbatch before a stage can."""
        routes = self.routes
        end = stage + backward * (len(routes.arriving_offsets) // 2)
        arriving = routes.arriving[routes.arriving_offsets[end] : routes.arriving_offsets[end + 1]]
        return [int(source) for source in routes.source[arriving]]


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
    schedule: OwnSchedule | None,  # noqa: ARG001 - part of the key
    fold: Fold | None,
) -> Program:
    check_plan(plan, graph)
    stages = slice_graph(graph, plan.bounds)
    crossings = _find_crossings(plan, graph, stages)
    orders = _orders(plan, graph, stages, crossings)
    computations = _join(plan, orders)
    builder = ProgramBuilder(plan.num_ranks)
    computed = builder.extend(
        np.repeat(np.arange(plan.num_ranks), np.diff(computations.offsets)),
        "compute",
        opcode=computations.opcode,
        stage=computations.stage,
        microbatch=computations.microbatch,
    )
    _append_transfers(builder, plan, computations, computed, crossings)
    if graph.mode == "training":
        buckets = folded_buckets(fold, graph) if fold else gradient_buckets(graph, plan)
        _append_exchange_and_steps(builder, plan, graph, stages, computations, computed, buckets)
    return builder.build(schedule=plan.schedule, plan_hash=content_hash(plan))


def forget_programs() -> None:
    """Drop the programs that were kept, so that building one can be timed."""
    _build_program.cache_clear()


def _orders(
    plan: Plan, graph: Graph, stages: tuple[StageSlice, ...], crossings: _Crossings
) -> tuple[OrderColumns, ...]:
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


def _find_crossings(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...]) -> _Crossings:
    """What goes out after each stage's forwards and backwards, and what they must have received."""
    size, float_bytes, num_stages = plan.microbatch_size, plan.workload.float_bytes, len(stages)
    rows: list[tuple[int, int, int, bool]] = []
    leaving: list[list[int]] = [[] for _ in range(2 * num_stages)]
    arriving: list[list[int]] = [[] for _ in range(2 * num_stages)]
    for channel in (channel for stage in stages for channel in stage.outgoing):
        ways = [(channel.source, channel.target, channel.forward_bytes(graph, size, float_bytes), False)]
        if channel.gradients:
            ways.append((channel.target, channel.source, channel.backward_bytes(graph, size, float_bytes), True))
        for source, target, num_bytes, is_gradient in ways:
            leaving[source + num_stages * is_gradient].append(len(rows))
            arriving[target + num_stages * is_gradient].append(len(rows))
            rows.append((source, target, num_bytes, is_gradient))
    table = np.array(rows, np.int64).reshape(-1, 4)
    routes = Routes(table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), *_ragged(leaving), *_ragged(arriving))
    return _Crossings(routes, table[:, 2], table[:, 3].astype(bool))


def _ragged(lists: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    offsets = np.cumsum([0, *(len(items) for items in lists)])
    return offsets.astype(np.int32), np.array([item for items in lists for item in items], np.int32)


def _join(plan: Plan, orders: tuple[OrderColumns, ...]) -> Computations:
    replica_offsets, replicas = _ragged([list(stage.ranks) for stage in plan.stages])
    return Computations(
        offsets=np.cumsum([0, *(len(order) for order in orders)]).astype(np.int64),
        opcode=np.concatenate([order.opcode for order in orders]),
        stage=np.concatenate([order.stage for order in orders]),
        microbatch=np.concatenate([order.microbatch for order in orders]),
        joint=np.concatenate([order.joint for order in orders]),
        replica_offsets=replica_offsets,
        replicas=replicas,
    )


def _append_transfers(
    builder: ProgramBuilder, plan: Plan, computations: Computations, computed: Ids, crossings: _Crossings
) -> None:
    """Sends after what makes their values, receives before what consumes them."""
    found = lay_out_transfers(computations, crossings.routes, plan.num_microbatches)
    ranks = np.arange(plan.num_ranks)
    senders, receivers = np.repeat(ranks, np.diff(found.send_offsets)), np.repeat(ranks, np.diff(found.receive_offsets))
    partners = np.empty(len(senders), np.int64)
    partners[found.receive_of] = receivers
    groups = _number_pairs(builder, plan.num_ranks, senders, partners)
    source, target = crossings.routes.source, crossings.routes.target
    sends = builder.extend(
        senders,
        "send",
        opcode=np.where(crossings.is_gradient, Opcode.SEND_GRADIENT, Opcode.SEND_ACTIVATION)[found.send_route],
        stage=source[found.send_route],
        microbatch=found.send_microbatch,
        version=-1,
        peer=target[found.send_route],
        num_bytes=crossings.num_bytes[found.send_route],
        group=groups,
    )
    receives = builder.extend(
        receivers,
        "receive",
        opcode=np.where(crossings.is_gradient, Opcode.RECEIVE_GRADIENT, Opcode.RECEIVE_ACTIVATION)[found.receive_route],
        stage=target[found.receive_route],
        microbatch=found.send_microbatch[found.receive_of],
        version=-1,
        peer=source[found.receive_route],
        num_bytes=crossings.num_bytes[found.receive_route],
        group=groups[found.receive_of],
    )
    builder.wait_each(sends, computed[found.send_after])
    builder.wait_each(receives, sends[found.receive_of])
    gated = found.receive_after >= 0
    builder.wait_each(receives[gated], computed[found.receive_after[gated]])
    builder.wait_each(computed[found.receive_before], receives)


def _number_pairs(builder: ProgramBuilder, num_ranks: int, senders: Ids, receivers: Ids) -> Ids:
    """The group of each message."""
    keys = senders * num_ranks + receivers
    # Not `np.unique`: senders come in order, which a stable sort makes use of.
    order = np.argsort(keys, kind="stable")
    starts = np.diff(keys[order], prepend=-1) != 0
    pairs = [builder.group((key // num_ranks, key % num_ranks)) for key in keys[order[starts]].tolist()]
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.array(pairs, np.int64)[np.cumsum(starts) - 1]
    return numbers


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
    releasing = np.isin(computations.opcode, (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT))
    for rank in range(plan.num_ranks):
        begin, end = computations.offsets[rank : rank + 2].tolist()
        ends = begin + np.flatnonzero(releasing[begin:end])
        last = dict(zip(computations.stage[ends].tolist(), computed[ends].tolist(), strict=True))
        mine = [stage for stage in plan.stages_of(rank) if stage in trained]
        sums: dict[int, list[int]] = {stage: [] for stage in mine}
        for index in sorted({index for stage in mine for index in held[stage]}):
            # A parameter that several stages of a rank share is summed once, when all its gradients are there.
            bucket = buckets[index]
            own = [stage for stage in bucket.stages if stage in sums]
            latest = max(own, key=last.__getitem__)
            ready = builder.mark(last[latest], bucket.index) if plan.exchange.overlap else last[latest]
            item = AllReduce(stage=latest, bucket=bucket.index, num_bytes=bucket.num_bytes)
            handle = builder.append(rank, "exchange", item, group=bucket.ranks, waits=(ready,))
            for stage in own:
                sums[stage].append(handle)
        for stage, awaited in sums.items():
            builder.append(rank, "compute", OptimizerStep(stage=stage), waits=awaited)
