"""Is another way of exchanging gradients worth it here? A table, a bound that no order beats, and a verdict.

Of all ways that were tried, in whatever order they compute and move, no step is shorter than

    bound = max(least computation, least communication)        of the busiest rank of each way

Ways: whole tensors as they become ready; parts by priorities, of the best of some sizes, going on into the next step
(ByteScheduler); a sharded optimizer; a hierarchy of nodes; servers on all ranks. To cross steps the forward of a layer
must be able to wait for that layer, so plans of one stage are cut into a stage per layer on the same ranks. Servers and
hierarchies have messages and sums of several groups on one link at a time, and are simulated with fair shares of links.
A gain below `WORTH_IT` is within what such predictions miss, and not recommended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner.evaluate import RankedPlan, evaluate_plan
from meshwright.program import gradient_buckets
from meshwright.simulator import (
    Contention,
    OwnOrder,
    Simulation,
    form_teams,
    schedule_exchange,
    simulate_plan,
)
from meshwright.spec import Cluster, Graph, Plan, PlanError, StagePlan, format_percent, format_seconds, suggest
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.offload import ON_DEVICE

ExchangeName = Literal["whole", "priorities", "sharded", "hierarchical", "servers"]
EXCHANGE_NAMES: tuple[ExchangeName, ...] = get_args(ExchangeName)
WORTH_IT = 0.03
_MIB = 2**20
# Parts that are tried: below, starting them takes longer than moving them; above, nothing urgent passes them.
PART_BYTES = (1 * _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
# A stage per layer, unless there are more; then neighbours share one.
_MOST_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangedPlan:
    """A plan with one way of exchanging, simulated."""

    name: str
    plan: Plan
    simulation: Simulation

    @property
    def step_time_s(self) -> float:
        """A steady step."""
        return self.simulation.step_time_s

    @property
    def computation_s(self) -> float:
        """Seconds that the busiest rank computes."""
        return max(rank.busy_s for rank in self.simulation.ranks)

    @property
    def communication_s(self) -> float:
        """Seconds in which the busiest rank exchanges."""
        return max(rank.exchange_s for rank in self.simulation.ranks)

    def row(self, own: ExchangedPlan) -> dict[str, Any]:
        """Keys ``exchange``, ``step_time_s``, ``gain_share`` over ``own``, ``exposed_s``, ``peak_memory_bytes``."""
        ranks = self.simulation.ranks
        return {
            "exchange": self.name,
            "step_time_s": self.step_time_s,
            "gain_share": own.step_time_s / self.step_time_s - 1,
            "exposed_s": max(rank.exposed_exchange_s for rank in ranks),
            "peak_memory_bytes": max(self.simulation.peak_memory_bytes),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeComparison:
    """A plan as it is and exchanging in other ways."""

    own: ExchangedPlan
    others: tuple[ExchangedPlan, ...]

    @property
    def computation_s(self) -> float:
        """Seconds that the busiest rank of the plan as it is computes."""
        return self.own.computation_s

    @property
    def communication_s(self) -> float:
        """Seconds in which the busiest rank of the plan as it is exchanges."""
        return self.own.communication_s

    @property
    def bound_s(self) -> float:
        """What none of the ways beats, in whatever order it computes and exchanges."""
        ways = (self.own, *self.others)
        return max(min(item.computation_s for item in ways), min(item.communication_s for item in ways))

    @property
    def best(self) -> ExchangedPlan:
        """The fastest; of equal ones the plan as it is."""
        return min((self.own, *self.others), key=lambda item: item.step_time_s)

    @property
    def gain(self) -> float:
        """By what share of its step the best is faster than the plan as it is."""
        return self.own.step_time_s / self.best.step_time_s - 1

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is more than such predictions miss."""
        return self.gain >= WORTH_IT

    def rows(self) -> list[dict[str, Any]]:
        """One plain row per way, the plan as it is first."""
        return [item.row(self.own) for item in (self.own, *self.others)]

    def explain(self) -> str:
        """The bound, and what to do, in a few sentences."""
        bound = (
            f"None of these ways beats {format_seconds(self.bound_s)}; as planned, computing takes "
            f"{format_seconds(self.computation_s)}, moving gradients {format_seconds(self.communication_s)}."
        )
        if self.is_worth_it:
            return f"{bound} Worth it: {self.best.name}, {format_percent(self.gain)} faster than the plan as it is."
        gain = f"{format_percent(self.gain)} by {self.best.name}" if self.best is not self.own else "nothing"
        return f"{bound} Stay with the plan: {gain} is to be gained. {self._reason()}"

    def _reason(self) -> str:
        exposed_s = max(rank.exposed_exchange_s for rank in self.own.simulation.ranks)
        if exposed_s < WORTH_IT * self.own.step_time_s:
            return f"Its exchange hides behind the backward, but for {format_seconds(exposed_s)}."
        if self.communication_s > self.computation_s:
            return "The links are busy nearly all the time: fewer bytes or faster links help, no order does."
        return "What is ready last is needed first, so that it can hide behind nothing."


def compare_exchanges(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    names: Sequence[str] = EXCHANGE_NAMES,
    *,
    own_orders: Sequence[tuple[str, OwnOrder]] = (),
    cost: CostModel | None = None,
    contention: Contention = "queued",
) -> ExchangeComparison:
    """Simulate a plan with other ways of exchanging its gradients; ``own_orders`` are functions with their names.

    Ways that a plan cannot take are left out. Raises PlanError for unknown names, for plans whose schedule never
    flushes, and for those that exchange nothing.
    """
    unknown = next((name for name in names if name not in EXCHANGE_NAMES), None)
    if unknown is not None:
        raise PlanError(
            f"There is no exchange {unknown!r}{suggest(unknown, EXCHANGE_NAMES)}; expected "
            f"{', '.join(EXCHANGE_NAMES)}, or your own as path/to/file.py:function."
        )
    _check_exchanges(plan, graph)
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    own = ExchangedPlan(
        name="as planned",
        plan=plan,
        simulation=simulate_plan(plan, graph, cluster, cost=cost, contention=_suited(plan, contention)),
    )
    others = []
    for name in names:
        variants = _variants(name, plan, graph, cluster, cost, None)
        others += _fastest(name, variants, graph, cluster, cost, contention)
    for name, order in own_orders:
        variants = _variants("priorities", plan, graph, cluster, cost, order)
        others += _fastest(name, variants, graph, cluster, cost, contention)
    return ExchangeComparison(own=own, others=tuple(others))


def follow_own_order(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    order: OwnOrder,
    *,
    cost: CostModel | None = None,
    memory: MemoryLimit | None = None,
) -> RankedPlan:
    """The plan whose gradients leave in an order of the user's, in parts of the size with which its step is shortest.

    The exchange ends with the step, as the runtime executes it. Raises PlanError as `compare_exchanges`, and for plans
    that scatter their sums.
    """
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    if plan.exchange.zero:
        raise PlanError(
            f"An own order was given for a plan with zero = {plan.exchange.zero}, which sums whole buckets; expected "
            "plain all-reduces. Plan with --zero 0."
        )
    seen = form_teams(plan, graph, cluster, cost)
    _check_exchanges(seen.plan, seen.graph)
    found = []
    for size in PART_BYTES:
        exchange = replace(plan.exchange, bucket_bytes=size, partition_bytes=size, sequence=())
        cut = replace(seen.plan, exchange=exchange)
        ordered = schedule_exchange(cut, seen.graph, seen.cluster, cost=seen.cost, own_order=order)
        followed = replace(plan, exchange=ordered.exchange)
        found.append(evaluate_plan(followed, graph, cluster, cost, memory=memory))
    return min(found, key=lambda item: item.step_time_s)


def cut_into_layers(plan: Plan, graph: Graph) -> Plan:
    """A plan of one stage with a stage per layer on the same ranks, or per few; other plans stay as they are."""
    count = min(len(graph.layers), _MOST_STAGES)
    if len(plan.stages) > 1 or count == 1 or plan.has_own_schedule:
        return plan
    ends = [len(graph.layers) * i // count for i in range(count + 1)]
    stages = tuple(StagePlan(start=start, stop=stop, ranks=plan.stages[0].ranks) for start, stop in pairwise(ends))
    return replace(plan, stages=stages, schedule="interleaved")


def _check_exchanges(plan: Plan, graph: Graph) -> None:
    if plan.is_asynchronous:
        raise PlanError(
            f"Exchanges were to be compared under the schedule {plan.schedule}, which never flushes; expected one that "
            "does, such as 1f1b."
        )
    if plan.exchange.zero >= 2:
        raise PlanError(
            f"Exchanges were to be compared for a plan with zero = {plan.exchange.zero}, whose gradients are scattered "
            "inside of backwards; expected zero 0 or 1. Plan with --zero 1, or without."
        )
    if plan.offload != ON_DEVICE:
        raise PlanError(
            f"Exchanges were to be compared for a plan that keeps {plan.offload.describe()}, which not all of them go "
            "with; expected all of it on the devices. Plan without --offload."
        )
    if graph.mode != "training" or not gradient_buckets(graph, plan):
        raise PlanError(
            "Exchanges were to be compared for a plan that exchanges no gradients; expected a stage with several "
            "replicas. Plan with fewer stages than ranks."
        )


def _variants(
    name: str, plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel, order: OwnOrder | None
) -> list[Plan]:
    """The plans to try for one way; none where it makes no sense."""
    kept = {key: getattr(plan.exchange, key) for key in ("clip_norm", "loss_scale")}
    ranks = tuple(range(plan.num_ranks))
    if name == "priorities":
        layered = cut_into_layers(plan, graph)
        exchanges = [
            GradientExchange(bucket_bytes=size, partition_bytes=size, across_steps=True, **kept) for size in PART_BYTES
        ]
        return [
            schedule_exchange(replace(layered, exchange=item), graph, cluster, cost=cost, own_order=order)
            for item in exchanges
        ]
    if name == "whole":
        return [replace(plan, exchange=GradientExchange(bucket_bytes=1, **kept))]
    if name == "sharded":
        return [replace(cut_into_layers(plan, graph), exchange=GradientExchange(zero=1, **kept))]
    if name == "servers":
        return [replace(plan, exchange=GradientExchange(servers=ranks, partition_bytes=4 * _MIB, **kept))]
    sizes = {sum(cluster.node_index(rank) == node for rank in ranks) for node in range(len(cluster.nodes))} - {0}
    if len(sizes) != 1 or sizes & {1, len(ranks)}:
        return []
    return [replace(plan, exchange=GradientExchange(algorithm="hierarchical", node_size=sizes.pop(), **kept))]


def _suited(plan: Plan, contention: Contention) -> Contention:
    """Where several groups want a link at once, waiting for it is exchanging, which shares show and a queue hides."""
    return "fair" if plan.exchange.servers or plan.exchange.algorithm == "hierarchical" else contention


def _fastest(
    name: str, variants: Sequence[Plan], graph: Graph, cluster: Cluster, cost: CostModel, contention: Contention
) -> list[ExchangedPlan]:
    simulated = []
    for variant in variants:
        try:
            simulation = simulate_plan(variant, graph, cluster, cost=cost, contention=_suited(variant, contention))
        except PlanError:
            # Replicas that are not as many on each node, and the like: this way is not open here.
            continue
        simulated.append(ExchangedPlan(name=name, plan=variant, simulation=simulation))
    return [min(simulated, key=lambda item: item.step_time_s)] if simulated else []
