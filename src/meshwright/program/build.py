"""Plan → Program: the schedule's order, completed by transfers, gradient exchange and the optimizer.

For each rank: `compute` runs the schedule's forwards and backwards and, at the end, the optimizer; `send` and
`receive` move what crosses between stages (spec.slices says what), `exchange` sums gradients. A receive is issued
`RECEIVE_LOOKAHEAD` compute instructions before its consumer, so that its transfer overlaps with computation while few
buffers are held. What comes from one rank is received in the order in which that rank sends it (transports without tags
deliver so); where an own schedule consumes it in another order, a message comes as early as the first behind it is
needed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from meshwright.program.buckets import Bucket, gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.orders import Computation, Order, compute_orders
from meshwright.program.own_schedules import find_schedule
from meshwright.program.progress import play_orders, without_backwards
from meshwright.program.schedules import Schedule
from meshwright.spec.codec import content_hash
from meshwright.spec.errors import ScheduleError
from meshwright.spec.graph import Graph, Op
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.program import AllReduce, Backward, Forward, OptimizerStep, Payload, Program, Receive, Send
from meshwright.spec.slices import StageSlice, slice_graph

# Compute instructions that may run while a receive is under way: two hide a transfer behind the instruction before
# the consumer
# even when the sender was late, and hold at most two received microbatches.
RECEIVE_LOOKAHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """What one stage sends another with every microbatch; ``sent`` has the handle of each microbatch's send."""

    payload: Payload
    source: int
    target: int
    num_bytes: int
    sent: list[int]


# (forward or backward, stage) → what goes out after it, or must have come in before.
_Ends = dict[tuple[type[Computation], int], list[_Route]]


def build_program(plan: Plan, graph: Graph) -> Program:
    """The program of a plan.

    Raises PlanError if the plan does not fit the graph; ScheduleReferenceError, ScheduleError or DeadlockError for an
    own schedule that changed, breaks a rule, or lets ranks wait in a circle.
    """
    return _build_program(plan, graph, find_schedule(plan))


@lru_cache(maxsize=16)
def _build_program(plan: Plan, graph: Graph, schedule: Schedule) -> Program:  # noqa: ARG001 - part of the key
    check_plan(plan, graph)
    stages = slice_graph(graph, plan.bounds)
    leaving, arriving = _find_ends(plan, graph, stages)
    orders = _orders(plan, graph, stages, arriving)
    builder = ProgramBuilder(plan.num_ranks)
    computed = {rank: _append_compute_and_sends(builder, plan, rank, order, leaving) for rank, order in orders.items()}
    for rank, order in orders.items():
        _append_receives(builder, plan, rank, order, computed[rank], arriving)
    if graph.mode == "training":
        sums = _find_sums(plan, graph, stages)
        for rank, order in orders.items():
            _append_exchange_and_step(builder, plan, rank, order, computed[rank], sums)
    return builder.build(schedule=plan.schedule, plan_hash=content_hash(plan))


def forget_programs() -> None:
    """Drop the programs that were kept, so that building one can be timed."""
    _build_program.cache_clear()


def _orders(
    plan: Plan, graph: Graph, stages: tuple[StageSlice, ...], arriving: _Ends
) -> dict[int, tuple[Computation, ...]]:
    """What every rank computes; an own schedule is checked against this graph first."""
    orders = {
        rank: order if stages[order.stage].has_backward else without_backwards(order)
        for rank, order in compute_orders(plan).items()
    }
    if plan.has_own_schedule:
        for order in orders.values():
            _check_written_buffers(plan, graph, stages[order.stage], order)
        play_orders(plan, orders, lambda item: [route.source for route in arriving[type(item), item.stage]])
    return {rank: order.items for rank, order in orders.items()}


def _check_written_buffers(plan: Plan, graph: Graph, stage: StageSlice, order: Order) -> None:
    """Running statistics follow the forwards: in another order than the microbatches', training would differ."""
    forwards = [place for place, item in enumerate(order.items) if isinstance(item, Forward)]
    late = next((b for a, b in pairwise(forwards) if order.items[b].microbatch < order.items[a].microbatch), None)
    writer = next((graph.ops[op] for op in stage.ops if _writes_buffer(graph.ops[op], stage)), None)
    if late is not None and writer is not None:
        raise ScheduleError(
            f"{plan.schedule} runs the forward of microbatch {order.items[late].microbatch} on stage {stage.index} "
            f"after that of a later one{order.where(plan, late)}, but {writer.module or writer.name} of that stage "
            "updates its running statistics in every forward, so the result would not be that of one process. Run the "
            "forwards of such stages in the order of the microbatches."
        )


def _writes_buffer(op: Op, stage: StageSlice) -> bool:
    """Batch normalisation, or an operator in place (torch ends its name with an underscore), on a buffer."""
    name = op.kind.split(".")[1] if op.kind.count(".") else op.kind
    return ("batch_norm" in name or name.endswith("_")) and not set(stage.buffers).isdisjoint(op.inputs)


def _append_compute_and_sends(
    builder: ProgramBuilder, plan: Plan, rank: int, order: tuple[Computation, ...], leaving: _Ends
) -> list[int]:
    """Append what a rank computes and what it sends then; returns the handle of each computation."""
    computed = []
    for item in order:
        handle = builder.append(rank, "compute", item)
        computed.append(handle)
        for route in leaving[type(item), item.stage]:
            send = Send(
                stage=route.source,
                microbatch=item.microbatch,
                peer=route.target,
                payload=route.payload,
                num_bytes=route.num_bytes,
            )
            pair = (rank, plan.stages[route.target].rank_of(item.microbatch))
            route.sent[item.microbatch] = builder.append(rank, "send", send, group=pair, waits=(handle,))
    return computed


def _append_receives(
    builder: ProgramBuilder,
    plan: Plan,
    rank: int,
    order: tuple[Computation, ...],
    computed: list[int],
    arriving: _Ends,
) -> None:
    for gate, place, route in _arrivals(plan, order, arriving):
        microbatch = order[place].microbatch
        receive = Receive(
            stage=route.target,
            microbatch=microbatch,
            peer=route.source,
            payload=route.payload,
            num_bytes=route.num_bytes,
        )
        waits = [route.sent[microbatch]]
        if gate > RECEIVE_LOOKAHEAD:
            waits.append(computed[gate - 1 - RECEIVE_LOOKAHEAD])
        pair = (plan.stages[route.source].rank_of(microbatch), rank)
        builder.wait(computed[place], builder.append(rank, "receive", receive, group=pair, waits=waits))


def _arrivals(plan: Plan, order: tuple[Computation, ...], arriving: _Ends) -> list[tuple[int, int, _Route]]:
    """What a rank receives, in order: the place before which it must be there, that of its consumer, and its route.

    Per sender in the order of sending; the place is the first at which it or anything behind it is consumed.
    """
    consumed = [(place, item, route) for place, item in enumerate(order) for route in arriving[type(item), item.stage]]
    if not plan.has_own_schedule:
        # Named schedules send and consume in one order: the same list, for less.
        return [(place, place, route) for place, _, route in consumed]
    by_sender: dict[int, list[tuple[int, int, _Route]]] = defaultdict(list)
    for place, item, route in consumed:
        sender = plan.stages[route.source].rank_of(item.microbatch)
        by_sender[sender].append((route.sent[item.microbatch], place, route))
    arrivals: list[tuple[int, int, _Route]] = []
    for messages in by_sender.values():
        messages.sort(key=lambda message: message[0])
        gate = len(order)
        gated = []
        for _, place, route in reversed(messages):
            gate = min(gate, place)
            gated.append((gate, place, route))
        arrivals += reversed(gated)
    # Senders of one stage never meet at one place, and stages keep the order of `_find_ends`: by number.
    return sorted(arrivals, key=lambda arrival: (arrival[0], arrival[2].source))


def _append_exchange_and_step(
    builder: ProgramBuilder,
    plan: Plan,
    rank: int,
    order: tuple[Computation, ...],
    computed: list[int],
    sums: dict[int, list[tuple[Bucket, AllReduce]]],
) -> None:
    stage = order[0].stage
    if stage not in sums:
        return
    last = max(place for place, item in enumerate(order) if isinstance(item, Backward))
    exchanged = []
    for bucket, item in sums[stage]:
        ready = builder.mark(computed[last], bucket.index) if plan.exchange.overlap else computed[last]
        exchanged.append(builder.append(rank, "exchange", item, group=bucket.ranks, waits=(ready,)))
    builder.append(rank, "compute", OptimizerStep(stage=stage), waits=exchanged)


def _find_sums(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...]) -> dict[int, list[tuple[Bucket, AllReduce]]]:
    """The sums of gradients of every stage that is trained, in their order."""
    trained = [stage for stage in stages if any(graph.tensors[item].requires_grad for item in stage.parameters)]
    sums: dict[int, list[tuple[Bucket, AllReduce]]] = {stage.index: [] for stage in trained}
    for bucket in gradient_buckets(graph, plan):
        for stage in bucket.stages:
            item = AllReduce(stage=stage, bucket=bucket.index, num_bytes=bucket.num_bytes)
            sums[stage].append((bucket, item))
    return sums


def _find_ends(plan: Plan, graph: Graph, stages: tuple[StageSlice, ...]) -> tuple[_Ends, _Ends]:
    """What goes out after each stage's forwards and backwards, and what they must have received."""
    size, float_bytes = plan.microbatch_size, plan.workload.float_bytes
    leaving: _Ends = {(kind, stage.index): [] for kind in (Forward, Backward) for stage in stages}
    arriving: _Ends = {key: [] for key in leaving}

    def add(kind: type[Computation], payload: Payload, source: int, target: int, num_bytes: int) -> None:
        sent = [-1] * plan.num_microbatches
        route = _Route(payload=payload, source=source, target=target, num_bytes=num_bytes, sent=sent)
        leaving[kind, source].append(route)
        arriving[kind, target].append(route)

    for item in (channel for stage in stages for channel in stage.outgoing):
        add(Forward, "activation", item.source, item.target, item.forward_bytes(graph, size, float_bytes))
        if item.gradients:
            add(Backward, "gradient", item.target, item.source, item.backward_bytes(graph, size, float_bytes))
    return leaving, arriving
