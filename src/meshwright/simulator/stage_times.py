"""Times and bytes of a plan's stages, as the simulator estimates them, for `program.find_orders`.

A backward in parts takes the time of a rank's second and later microbatches. A transfer takes the time of the slowest
pair of replicas alone on its links; transfers from one computation to several stages go one after the other. In a
chain, this model omits values that skip a stage; the simulator includes them.
"""

from __future__ import annotations

from math import lcm

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.autocast import as_computed
from meshwright.program import StageTimes, gradient_buckets
from meshwright.simulator.stage_bytes import stage_bytes
from meshwright.simulator.stage_costs import stage_costs
from meshwright.simulator.state_shards import find_shards
from meshwright.spec import Graph, Plan, PlanError, check_plan, slice_graph, to_picoseconds


def stage_times(plan: Plan, graph: Graph, cost: CostModel) -> StageTimes:
    """Return the times and bytes of a plan's stages, without memory limits. Raises PlanError for an inference plan."""
    check_plan(plan, graph)
    if plan.workload.kind != "training":
        raise PlanError("The plan is for inference, which has forwards only; orders are found for training.")
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
