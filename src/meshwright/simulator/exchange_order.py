"""The order in which a plan's gradient parts are sent (`schedule_exchange`); times of its stages (`stage_times`).

One simulated step gives the times at which the parts are ready: they follow from the backwards alone. The policy
(`program.part_order`, or a user's function) receives these times and returns an order, which holds for every step. The
order becomes data of the plan (``exchange.sequence``), and simulator and runtime both use the program made from the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.autocast import as_computed
from meshwright.program import ReadyPart, StageTimes, build_program, gradient_buckets, order_parts
from meshwright.program.buckets import cut_parts
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.simulate import SimulatedRun, run_program
from meshwright.simulator.stage_bytes import stage_bytes
from meshwright.simulator.stage_costs import stage_costs
from meshwright.simulator.state_shards import find_shards
from meshwright.spec import Cluster, Graph, Plan, PlanError, Program, check_plan, slice_graph, to_picoseconds
from meshwright.spec.instructions import SUMS


# For `program.find_orders`, as the simulator estimates them. A backward in parts takes the time of a rank's second and
# later microbatches. A transfer takes the time of the slowest pair of replicas alone on its links; transfers from one
# computation to several stages go one after the other. In a chain, this model omits values that skip a stage; the
# simulator includes them.
def stage_times(plan: Plan, graph: Graph, cost: CostModel) -> StageTimes:
    """Return the times (ps) and bytes of a plan's stages for `find_orders`, without memory limits.

    Raises PlanError for a plan of inference.
    """
    check_plan(plan, graph)
    if plan.workload.kind != "training":
        raise PlanError("The plan is for inference, which has only forwards; orders are found for training plans only.")
    graph = as_computed(graph, plan.workload.numbers)
    stages, buckets = slice_graph(graph, plan.bounds), gradient_buckets(graph, plan)
    kinds = [cost.cluster.device_kind(rank) for rank in range(plan.num_ranks)]
    times: NDArray[np.int64] = np.zeros((3, len(stages), plan.num_ranks), np.int64)
    kept = np.zeros(len(stages), np.int64)
    for stage in stages:
        held = tuple(item for item in buckets if stage.index in item.stages)
        shards = find_shards(plan, stage.index, cost.cluster)
        for kind in {kinds[rank].name: kinds[rank] for rank in plan.stages[stage.index].ranks}.values():
            ranks = [rank for rank in plan.stages[stage.index].ranks if kinds[rank].name == kind.name]
            costs = stage_costs(graph, plan, stage, held, kind, cost, shards)
            backward_s = (costs.inputs_s, costs.weights.later_s) if stage.has_backward else (0.0, 0.0)
            for row, seconds in enumerate((costs.forward_s, *backward_s)):
                times[row, stage.index, ranks] = to_picoseconds(seconds)
            if stage.has_backward:
                in_use = stage_bytes(graph, plan, stage, held, kind, cost, shards)
                kept[stage.index] = max(kept[stage.index], in_use.microbatch_bytes)
    size, width = plan.microbatch_size, plan.workload.float_bytes
    channels = {(channel.source, channel.target): channel for stage in stages for channel in stage.outgoing}
    edges = [(stage.index, target) for stage in stages for target in plan.feeds(stage.index)]
    crossing: NDArray[np.int64] = np.zeros((2, len(edges)), np.int64)
    sent = np.zeros((2, len(stages)), np.int64)
    for number, (source, target) in enumerate(edges):
        if channel := channels.get((source, target)):
            there = _slowest(plan, cost, source, target, channel.forward_bytes(graph, size, width))
            back = _slowest(plan, cost, target, source, channel.backward_bytes(graph, size, width))
            sent[[0, 1], [source, target]] += to_picoseconds(there), to_picoseconds(back)
            crossing[:, number] = sent[[0, 1], [source, target]]
    return StageTimes(
        forward_ps=times[0],
        inputs_ps=times[1],
        weights_ps=times[2],
        sending_ps=crossing[0],
        returning_ps=crossing[1],
        kept_bytes=kept,
    )


def _slowest(plan: Plan, cost: CostModel, sender: int, receiver: int, num_bytes: int) -> float:
    """Return the seconds of a message between the slowest pair of ranks of two stages; 0 for no bytes."""
    if not num_bytes:
        return 0.0
    source, target = plan.stages[sender], plan.stages[receiver]
    period = min(lcm(len(source.turns), len(target.turns)), plan.num_microbatches)
    pairs = {(source.rank_of(m), target.rank_of(m)) for m in range(period)}
    return max((cost.collective_seconds("send", pair, num_bytes) for pair in pairs if pair[0] != pair[1]), default=0.0)


# A user's function: parts of one group → their indices in the order in which they are to be sent.
OwnOrder = Callable[[Sequence[ReadyPart]], Iterable[int]]


def schedule_exchange(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    *,
    credit_bytes: int = 0,
    cost: CostModel | None = None,
    own_order: OwnOrder | None = None,
) -> Plan:
    """Return the plan with ``exchange.sequence`` set: parts nearest to the model's input first, or by ``own_order``.

    At most ``credit_bytes`` are in flight at once; 0 sends one part after the other. With parameter servers, a part is
    assumed to take the time of its all-reduce. Raises PlanError as `build_program` does, and if ``own_order`` does not
    return every part once.
    """
    parts = ready_parts(plan, graph, cluster, cost=cost)
    groups: dict[tuple[int, ...], list[ReadyPart]] = {}
    buckets = gradient_buckets(graph, plan)
    of_part = cut_parts(buckets, replace(plan.exchange, sequence=())).bucket
    for part in parts:
        groups.setdefault(buckets[of_part[part.index]].ranks, []).append(part)
    admitted = sorted(
        (moment, place, index)
        for group in groups.values()
        for place, (moment, index) in enumerate(
            order_parts(group, credit_bytes) if own_order is None else _follow(own_order, group)
        )
    )
    sequence = tuple(index for _, _, index in admitted)
    return replace(plan, exchange=replace(plan.exchange, sequence=sequence))


def _follow(own_order: OwnOrder, parts: list[ReadyPart]) -> list[tuple[int, int]]:
    """Return (moment, index) of each part in a user's order, sent one after the other as they become ready."""
    known = {part.index: part for part in parts}
    answer: Any = own_order(tuple(parts))
    order = list(answer) if isinstance(answer, Iterable) else None
    if order is None or sorted(map(str, order)) != sorted(map(str, known)):
        given = type(answer).__name__ if order is None else str(order)[:80]
        raise PlanError(
            f"Your function for the order of the exchange returned {given}; expected the `index` of each of its "
            f"{len(parts)} parts once. Return `[part.index for part in ...]`."
        )
    free_ps, moments = 0, []
    for index in order:
        moments.append((max(free_ps, known[index].ready_ps), index))
        free_ps = moments[-1][0] + known[index].duration_ps
    return moments


def ready_parts(plan: Plan, graph: Graph, cluster: Cluster, *, cost: CostModel | None = None) -> list[ReadyPart]:
    """Return the parts of the plan's exchange: when each is ready on all of its ranks, and how long its sum takes."""
    first = replace(plan, exchange=replace(plan.exchange, sequence=(), across_steps=False, servers=()))
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    program = build_program(first, graph)
    costs = estimate_program(program, first, graph, cost)
    run = run_program(program, costs, 1)
    body = program.body
    sums = np.flatnonzero(np.isin(body.opcode, SUMS))
    ready = _ready_ps(program, run, sums)
    buckets = gradient_buckets(graph, first)
    parts = cut_parts(buckets, first.exchange)
    ready_ps, duration_ps = np.zeros(len(parts.bucket), np.int64), np.zeros(len(parts.bucket), np.int64)
    np.maximum.at(ready_ps, body.peer[sums], ready)
    duration_ps[body.peer[sums]] = costs.duration_ps[costs.body.cost_class[sums]]
    # The first buckets of a stage to be ready are those of its last layers.
    order = sorted(range(len(buckets)), key=lambda index: (min(buckets[index].stages), -index))
    urgency = np.empty(len(buckets), np.int64)
    urgency[order] = np.arange(len(buckets))
    return [
        ReadyPart(
            index=index,
            stage=min(buckets[bucket].stages),
            num_bytes=int(parts.num_bytes[index]),
            ready_ps=int(ready_ps[index]),
            duration_ps=int(duration_ps[index]),
            urgency=int(urgency[bucket]),
        )
        for index, bucket in enumerate(parts.bucket.tolist())
    ]


def _ready_ps(program: Program, run: SimulatedRun, sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when all waits of each given instruction have happened; ids are those of the body, the only section."""
    body, network = program.body, run.network
    marks = run.end_ps[network.mark_instruction] + network.mark_shift_ps
    moments = np.concatenate([run.end_ps, marks])
    return np.array([moments[body.waits_of(i)].max(initial=0) for i in sums.tolist()], np.int64)
