"""Compare other ways of reducing gradients: a table, a lower bound for any order, and a verdict.

Whatever the order of computation and communication, no step of the tried ways is shorter than

    bound = max(least computation, least communication)        of the busiest rank of each way

Ways: whole tensors as they become ready; parts by priority, with the best of several part sizes, continuing into the
next step (ByteScheduler); a sharded optimizer; a hierarchy of nodes; parameter servers on all ranks. Crossing steps
requires that the forward of a layer can wait for that layer, so plans of one stage are cut into a stage per layer on
the same ranks. Servers and hierarchies have messages of several groups on one link at a time, so they are simulated
with fair sharing of links. A gain below `WORTH_IT` is within the error of the predictions and not recommended.
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
# Part sizes that are tried: smaller ones are dominated by latency; larger ones delay urgent gradients.
PART_BYTES = (1 * _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
# One stage per layer up to this number; beyond it, neighbouring layers share a stage.
_MOST_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangedPlan:
    """A plan with one way of reducing gradients, simulated."""

    name: str
    plan: Plan
    simulation: Simulation

    @property
    def step_time_s(self) -> float:
        """Seconds of a steady step."""
        return self.simulation.step_time_s

    @property
    def computation_s(self) -> float:
        """Seconds that the busiest rank computes."""
        return max(rank.busy_s for rank in self.simulation.ranks)

    @property
    def communication_s(self) -> float:
        """Seconds that the busiest rank spends on gradient reduction."""
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
    """A plan with its own and with other gradient reductions."""

    own: ExchangedPlan
    others: tuple[ExchangedPlan, ...]

    @property
    def computation_s(self) -> float:
        """Seconds that the busiest rank computes under the original plan."""
        return self.own.computation_s

    @property
    def communication_s(self) -> float:
        """Seconds that the busiest rank spends on gradient reduction under the original plan."""
        return self.own.communication_s

    @property
    def bound_s(self) -> float:
        """Seconds that no way beats, in any order of computation and communication."""
        ways = (self.own, *self.others)
        return max(min(item.computation_s for item in ways), min(item.communication_s for item in ways))

    @property
    def best(self) -> ExchangedPlan:
        """The fastest way; the original plan in case of a tie."""
        return min((self.own, *self.others), key=lambda item: item.step_time_s)

    @property
    def gain(self) -> float:
        """The share by which the best way is faster than the original plan."""
        return self.own.step_time_s / self.best.step_time_s - 1

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain exceeds the error of the predictions."""
        return self.gain >= WORTH_IT

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row per way, the original plan first."""
        return [item.row(self.own) for item in (self.own, *self.others)]

    def explain(self) -> str:
        """Return the bound and the recommendation in a few sentences."""
        bound = (
            f"None of these ways beats {format_seconds(self.bound_s)}; as planned, computing takes "
            f"{format_seconds(self.computation_s)}, moving gradients {format_seconds(self.communication_s)}."
        )
        if self.is_worth_it:
            return f"{bound} Worth it: {self.best.name}, {format_percent(self.gain)} faster than the plan as it is."
        gain = f"{format_percent(self.gain)} by {self.best.name}" if self.best is not self.own else "nothing"
        return f"{bound} Stay with the plan: {gain} can be gained. {self._reason()}"

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
    """Simulate a plan with other gradient reductions; ``own_orders`` are functions with their names.

    Ways that do not apply to the plan are left out. Raises PlanError for unknown names, for plans with an asynchronous
    schedule, and for plans that reduce no gradients.
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
    """Return the plan whose gradients are sent in the user's order, in parts of the size with the shortest step.

    The reduction ends with the step, as the runtime executes it. Raises PlanError as `compare_exchanges`, and for plans
    that scatter their gradients (ZeRO).
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
    """Cut a plan of one stage into a stage per layer, or per few layers, on the same ranks; leave other plans as is."""
    count = min(len(graph.layers), _MOST_STAGES)
    if len(plan.stages) > 1 or count == 1 or plan.has_own_schedule:
        return plan
    ends = [len(graph.layers) * i // count for i in range(count + 1)]
    stages = tuple(StagePlan(start=start, stop=stop, ranks=plan.stages[0].ranks) for start, stop in pairwise(ends))
    return replace(plan, stages=stages, schedule="interleaved")


def _check_exchanges(plan: Plan, graph: Graph) -> None:
    if plan.is_asynchronous:
        raise PlanError(
            f"Exchanges were to be compared under the schedule {plan.schedule}, which is asynchronous; expected a "
            "synchronous one, such as 1f1b."
        )
    if plan.exchange.zero >= 2:
        raise PlanError(
            f"Exchanges were to be compared for a plan with zero = {plan.exchange.zero}, whose gradients are scattered "
            "during the backward; expected zero 0 or 1. Plan with --zero 1, or without."
        )
    if plan.offload != ON_DEVICE:
        raise PlanError(
            f"Exchanges were to be compared for a plan that keeps {plan.offload.describe()}, which not all of them "
            "support; expected everything on the devices. Plan without --offload."
        )
    if graph.mode != "training" or not gradient_buckets(graph, plan):
        raise PlanError(
            "Exchanges were to be compared for a plan that exchanges no gradients; expected a stage with several "
            "replicas. Plan with fewer stages than ranks."
        )


def _variants(
    name: str, plan: Plan, graph: Graph, cluster: Cluster, cost: CostModel, order: OwnOrder | None
) -> list[Plan]:
    """Return the plans to try for one way; empty if it does not apply."""
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
    """Use fair sharing where several groups share a link: waiting counts as communication; a queue would hide it."""
    return "fair" if plan.exchange.servers or plan.exchange.algorithm == "hierarchical" else contention


def _fastest(
    name: str, variants: Sequence[Plan], graph: Graph, cluster: Cluster, cost: CostModel, contention: Contention
) -> list[ExchangedPlan]:
    simulated = []
    for variant in variants:
        try:
            simulation = simulate_plan(variant, graph, cluster, cost=cost, contention=_suited(variant, contention))
        except PlanError:
            # The way does not apply here, for example because nodes have unequal numbers of replicas.
            continue
        simulated.append(ExchangedPlan(name=name, plan=variant, simulation=simulation))
    return [min(simulated, key=lambda item: item.step_time_s)] if simulated else []
