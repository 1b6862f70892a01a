"""Evaluate plans by simulation: step time, its breakdown and 80 % interval, memory, whether a plan fits, and latencies.

A step of the busiest rank (the rank that computes longest; the first of them) is exactly the sum

    step = compute + optimizer + exposed exchange + exposed offload + exposed communication + bubble

where "exposed" means that the rank computes nothing meanwhile. Terms are seconds of a steady step in the simulator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.cost.without import without_devices
from meshwright.planner.prices import PlanPrice
from meshwright.planner.rank_layouts import memory_limit
from meshwright.simulator import (
    Contention,
    NodeMemory,
    PeakMemory,
    Simulation,
    form_teams,
    predict_reserved,
    simulate_plan,
    simulate_plans,
)
from meshwright.simulator.simulation import node_memory
from meshwright.spec import Cluster, Graph, MeshwrightError, Plan, format_seconds
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.used_devices import used_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """The 80 % interval of a step time, in seconds.

    ``measured`` is False if the costs of all ops come from datasheets (rooflines).
    """

    low_s: float
    high_s: float
    measured: bool


# The plan is simulated with all costs as fast, and as slow, as they may be:
#
#     low, high of a step  =  step(every cost at the low, the high end of its 80 % interval)
#
# Ops of a device kind are scaled by low / t and by high / t of their sum (`cost.costs.add_intervals`); every transfer,
# optimizer step and host has its own ends (`CostModel.at_end`); bubbles and exposed times follow. Ops, transfers,
# optimizer and hosts err independently: that all are late together is rarer than that one of them is. Hence the
# interval of a step covers more than 80 %.
def predict_step_interval(
    plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel, *, contention: Contention = "queued"
) -> StepInterval:
    """Return the 80 % interval of a plan's step time, from the intervals of its ops, transfers and optimizer steps.

    Its ends are the step times simulated with all costs at their low and all at their high ends.
    """
    plan, graph, cluster, cost = form_teams(plan, graph, cluster, cost)
    kinds = {cluster.device_kind(rank).name: cluster.device_kind(rank) for rank in range(plan.num_ranks)}
    bases = {basis for kind in kinds.values() for basis in cost.estimate_ops(graph, plan.microbatch_size, kind).basis}
    low, high = (
        simulate_plan(plan, graph, cluster, cost=cost.at_end(end), contention=contention).step_time_s
        for end in ("low", "high")
    )
    return StepInterval(low_s=low, high_s=high, measured=bases != {"roofline"})


def explain_step_interval(interval: StepInterval) -> str:
    """Return one printable sentence with the ends of the interval and the source of the costs."""
    ends = f"{format_seconds(interval.low_s)} to {format_seconds(interval.high_s)}"
    if interval.measured:
        return f"Step time, 80 % interval (from its ops, transfers and optimizer): {ends}."
    return f"Step time, 80 % interval (from datasheets; nothing was measured): {ends}."


# Seconds are sums of whole picoseconds; smaller differences are rounding errors.
_DECIMALS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The terms of one step of the busiest rank, in seconds; they add up to the step time.

    ``inside_s``: waiting for collectives inside forward and backward passes (tensor-parallel ops, sharded states).
    ``communication_s``, ``exchange_s`` and ``offload_s``: transfers between stages, gradient reduction, and copies from
    and to the host, each as far as it does not overlap with computation.
    """

    compute_s: float
    inside_s: float
    bubble_s: float
    communication_s: float
    exchange_s: float
    offload_s: float
    optimizer_s: float

    def terms(self) -> dict[str, float]:
        """Return a dict from the printed name of each term to its seconds."""
        return {
            "compute": self.compute_s,
            "collectives inside passes": self.inside_s,
            "bubble": self.bubble_s,
            "exposed communication": self.communication_s,
            "exposed exchange": self.exchange_s,
            "exposed offload": self.offload_s,
            "optimizer": self.optimizer_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan with its predicted step time, throughput and memory.

    ``bubble_fraction`` and ``mfu`` are shares, 0..1. ``busiest_rank`` is the rank that computes longest; ``breakdown``
    splits its step. One entry per rank have ``memory`` (the parts of the peak), ``reserved_bytes`` (what the allocator
    reserves for that peak) and ``memory_limit_bytes`` (what it may reserve). ``nodes`` is the use of host memory and
    drives. ``sequence_length`` is in tokens, None for models that read no tokens. Plans of a search also have
    ``estimate_s``, the closed-form step time of `slicing`, and ``recompute``, the word for what is recomputed.
    Computed only on request: ``interval`` of the step time; ``latency_s``, seconds of one microbatch through idle
    devices; ``makespan_s``, seconds of a batch that arrives at once; ``price``.
    """

    plan: Plan
    step_time_s: float
    samples_per_s: float
    bubble_fraction: float
    busiest_rank: int
    breakdown: Breakdown
    memory: tuple[PeakMemory, ...]
    reserved_bytes: tuple[int, ...]
    memory_limit_bytes: tuple[int, ...]
    mfu: float | None = None
    sequence_length: int | None = None
    estimate_s: float | None = None
    recompute: str = ""
    interval: StepInterval | None = None
    nodes: tuple[NodeMemory, ...] = ()
    latency_s: float | None = None
    makespan_s: float | None = None
    price: PlanPrice | None = None

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The peak memory of each rank, in bytes."""
        return tuple(item.total_bytes for item in self.memory)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all devices together; None for models that read no tokens."""
        return None if self.sequence_length is None else self.samples_per_s * self.sequence_length

    @property
    def device_seconds(self) -> float:
        """Number of devices times the step time: proportional to the price of a step if all devices cost the same."""
        return self.plan.num_devices * self.step_time_s

    @property
    def aimed_s(self) -> float:
        """Seconds by which plans are ranked: ``makespan_s`` if the search aims at latency, else the step time."""
        return self.step_time_s if self.makespan_s is None else self.makespan_s

    @property
    def memory_owner(self) -> str:
        """The name of the largest part of the peak memory on the fullest rank, such as activations."""
        return self.memory[self.fullest_rank].owner

    @property
    def fullest_rank(self) -> int:
        """The rank with the fewest bytes left below its memory limit; in case of a tie, the first."""
        spare = [limit - held for held, limit in zip(self.reserved_bytes, self.memory_limit_bytes, strict=True)]
        return spare.index(min(spare))

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the fullest rank exceeds its memory; negative or 0 if the plan fits."""
        rank = self.fullest_rank
        return self.reserved_bytes[rank] - self.memory_limit_bytes[rank]

    @property
    def fits(self) -> bool:
        """True if the reserved memory of all ranks and the host memory and drives of all nodes are within limits."""
        return self.excess_bytes <= 0 and all(node.fits for node in self.nodes)

    def memory_rows(self) -> list[dict[str, Any]]:
        """Return one dict per rank: whether the plan fits there, and the parts of the peak memory.

        Keys: ``rank``, ``stages`` (their indexes), ``fits``, ``peak_bytes``, ``reserved_bytes`` (by the allocator, for
        the peak), ``limit_bytes`` (for reserved bytes), ``headroom_bytes`` (limit less reserved; negative if the rank
        exceeds its limit), ``parts_bytes`` (a dict from part to bytes, which add up to the peak).
        """
        return [
            {
                "rank": rank,
                "stages": list(self.plan.stages_of(rank)),
                "fits": held <= limit,
                "peak_bytes": use.total_bytes,
                "reserved_bytes": held,
                "limit_bytes": limit,
                "headroom_bytes": limit - held,
                "parts_bytes": dict(use.parts),
            }
            for rank, (use, held, limit) in enumerate(
                zip(self.memory, self.reserved_bytes, self.memory_limit_bytes, strict=True)
            )
        ]


def evaluate_plan(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    cost: CostModel,
    *,
    memory: MemoryLimit | None = None,
    estimate_s: float | None = None,
    contention: Contention = "queued",
    only_fitting: bool = False,
) -> RankedPlan:
    """Simulate a plan and return it with its prediction. A plan that exceeds memory raises no error.

    ``memory`` limits what a plan may reserve; by default the memory of the devices. ``estimate_s`` is copied to the
    result. With ``only_fitting``, ``reserved_bytes`` may lack the allocator's overhead: for ranks whose peak exceeds
    their memory by far, and for all ranks of a plan that exceeds a host's memory. Raises PlanError if the plan does not
    match the graph or the cluster.
    """
    seen = form_teams(plan, graph, cluster, cost)
    simulation = simulate_plan(seen.plan, seen.graph, seen.cluster, cost=seen.cost, contention=contention)
    item = rank_simulation(
        simulation,
        seen.plan,
        seen.graph,
        seen.cluster,
        memory=memory,
        estimate_s=estimate_s,
        cost=seen.cost,
        only_fitting=only_fitting,
    )
    return replace(item, plan=plan, sequence_length=graph.sequence_length)


def share_of_hosts(plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel) -> float:
    """Return the used share of the fullest host's memory or drives (above 1: too much), without a simulation.

    Returns 0 if nothing is offloaded, and for an invalid plan, for which `evaluate_plan` raises the reason.
    """
    if plan.offload == ON_DEVICE:
        return 0.0
    try:
        seen = form_teams(plan, graph, cluster, cost)
        return max((node.share for node in node_memory(seen.plan, seen.graph, seen.cost.cluster)), default=0.0)
    except MeshwrightError:
        return 0.0


def predict_makespan(plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel) -> float:
    """Return the seconds from the arrival of a whole global batch at idle devices to its last answer."""
    seen = form_teams(plan, graph, cluster, cost)
    return simulate_plan(seen.plan, seen.graph, seen.cluster, cost=seen.cost, num_steps=1).timeline.duration_s


def predict_latency(plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel) -> float:
    """Return the largest latency of one microbatch, in seconds: alone, through an idle inference pipeline.

    The maximum is over the chains of replicas that the microbatches of a step take.
    """
    cost = without_devices(cost, plan.idle)
    plan, cluster = replace(plan, idle=()), used_of(plan, cluster)
    columns, width = cluster.columns(), plan.sharding.width
    chains: dict[Hashable, tuple[int, ...]] = {}
    period = lcm(*(len(stage.turns) for stage in plan.stages))
    for microbatch in range(min(period, plan.num_microbatches)):
        chain = tuple(stage.rank_of(microbatch) for stage in plan.stages)
        devices = [team * width + k for team in chain for k in range(width)]
        nodes = columns.node[devices].tolist()
        # Chains over equal devices of equal nodes, in the same order, have the same latency.
        like = *columns.kind[devices].tolist(), *columns.node_kind[devices].tolist(), *map(nodes.index, nodes)
        chains.setdefault(like, chain)
    return max(_predict_alone(plan, graph, cost, chain) for chain in chains.values())


def _predict_alone(plan: Plan, graph: Graph, cost: CostModel, chain: Sequence[int]) -> float:
    """Return the seconds of one microbatch through these replicas on a cluster of their devices only."""
    teams, width = sorted(set(chain)), plan.sharding.width
    kept = {team * width + place for team in teams for place in range(width)}
    there = without_devices(cost, set(range(cost.cluster.num_ranks)) - kept)
    alone = replace(
        plan,
        workload=replace(plan.workload, global_batch=plan.microbatch_size * plan.sharding.expert),
        num_microbatches=1,
        stages=tuple(
            replace(stage, ranks=(teams.index(team),), shares=())
            for stage, team in zip(plan.stages, chain, strict=True)
        ),
    )
    seen = form_teams(alone, graph, there.cluster, there)
    return simulate_plan(seen.plan, seen.graph, seen.cluster, cost=seen.cost).timeline.duration_s


def evaluate_plans(
    plans: Sequence[Plan], graph: Graph, cluster: Cluster, cost: CostModel, *, contention: Contention = "queued"
) -> tuple[RankedPlan, ...]:
    """Simulate plans, in several processes where that is faster, and return their predictions in the same order.

    Raises the error of the first invalid plan.
    """
    found = simulate_plans(plans, graph, cluster, cost=cost, contention=contention)
    items: list[RankedPlan] = []
    for plan, simulation in zip(plans, found, strict=True):
        if isinstance(simulation, MeshwrightError):
            raise simulation
        seen = form_teams(plan, graph, cluster, cost)
        item = rank_simulation(simulation, seen.plan, seen.graph, seen.cluster, cost=seen.cost)
        items.append(replace(item, plan=plan))
    return tuple(items)


def rank_simulation(
    simulation: Simulation,
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    *,
    memory: MemoryLimit | None = None,
    estimate_s: float | None = None,
    cost: CostModel | None = None,
    only_fitting: bool = False,
) -> RankedPlan:
    """Return the prediction of a plan from its simulation, without simulating again.

    ``plan``, ``graph`` and ``cluster`` are those that were simulated; the other parameters are as in `evaluate_plan`.
    """
    busy = [rank.busy_s for rank in simulation.ranks]
    busiest = busy.index(max(busy))
    limits = tuple(memory_limit(cluster, rank, memory or MemoryLimit()) for rank in range(len(simulation.memory)))
    peaks = [use.total_bytes for use in simulation.memory]
    if only_fitting and not all(node.fits for node in simulation.nodes):
        reserved = tuple(peaks)
    else:
        reserved = predict_reserved(plan, graph, cluster, peaks, limits, cost, only_fitting=only_fitting)
    return RankedPlan(
        plan=plan,
        step_time_s=simulation.step_time_s,
        samples_per_s=simulation.samples_per_s,
        bubble_fraction=simulation.bubble_fraction,
        busiest_rank=busiest,
        breakdown=_break_down(simulation, busiest),
        memory=simulation.memory,
        reserved_bytes=reserved,
        memory_limit_bytes=limits,
        mfu=simulation.mfu,
        sequence_length=graph.sequence_length,
        estimate_s=estimate_s,
        nodes=simulation.nodes,
    )


def _break_down(simulation: Simulation, rank: int) -> Breakdown:
    seconds = simulation.ranks[rank]
    communication_s = round(
        seconds.exposed_communication_s - seconds.exposed_exchange_s - seconds.exposed_offload_s, _DECIMALS
    )
    return Breakdown(
        compute_s=seconds.forward_s + seconds.backward_s - seconds.exchanged_inside_s - seconds.copied_inside_s,
        inside_s=seconds.exchanged_inside_s,
        bubble_s=seconds.idle_s - seconds.exposed_communication_s,
        communication_s=communication_s,
        exchange_s=seconds.exposed_exchange_s,
        offload_s=seconds.exposed_offload_s + seconds.copied_inside_s,
        optimizer_s=seconds.optimizer_s,
    )
