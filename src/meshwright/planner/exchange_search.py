"""Compare ways to reduce gradients (`compare_exchanges`); find the best order of computation (`find_order`).

The ways to reduce gradients (exchanges) are: whole tensors as they become ready; parts of tensors by priority, with the
best of several part sizes, continuing into the next step (ByteScheduler); a sharded optimizer; a hierarchy of nodes;
parameter servers on all ranks. In any order of computation and communication, no step of these is shorter than

    bound = max(least computation, least communication)        of the busiest rank under each exchange

If a reduction continues into the next step, the forward of a layer must be able to wait for the gradients of that layer
alone. So plans of one stage are cut into a stage per layer on the same ranks. Servers and hierarchies send messages of
several groups over one link at a time, so they are simulated with fair sharing of links. A gain below `WORTH_IT` is
within the error of the predictions and not recommended. `sum_in_buckets` is the closed form of a reduction, used by
estimates of stages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.cost.without import without_devices
from meshwright.planner.evaluate import RankedPlan, evaluate_plan
from meshwright.planner.rank_layouts import memory_limit
from meshwright.program import (
    SCHEDULES,
    FoundOrders,
    Order,
    compute_orders,
    find_orders,
    gradient_buckets,
    with_schedule,
    write_orders,
)
from meshwright.simulator import (
    Contention,
    OwnOrder,
    Simulation,
    form_teams,
    schedule_exchange,
    simulate_plan,
    stage_times,
)
from meshwright.spec import (
    Cluster,
    GradientExchange,
    Graph,
    Opcode,
    Plan,
    PlanError,
    StagePlan,
    format_percent,
    format_seconds,
    suggest,
    with_branches,
    write_text,
)
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.schedules import layout_of


@compiled
def sum_in_buckets(num_bytes: float, bucket_bytes: float, latency_s: float, bucket_s: float) -> tuple[float, float]:
    """Return the seconds to reduce ``num_bytes`` of gradients: all buckets one after the other, and the last alone.

    The last bucket matters because no backward overlaps with it. ``latency_s`` and ``bucket_s`` are the seconds to
    reduce one byte and a full bucket of ``bucket_bytes``; sizes between them are interpolated linearly.
    """
    full = np.floor(num_bytes / bucket_bytes)
    rest = num_bytes / bucket_bytes - full
    if rest > 0.0:
        last = latency_s + (bucket_s - latency_s) * rest
        return full * bucket_s + last, last
    return full * bucket_s, bucket_s


# How often limits are tightened if the simulator reports more memory than they allow.
_MAX_ATTEMPTS = 4
_RELEASING = (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """The result of `find_order`: the plan under the fastest order, and the text of the order file.

    ``best`` is that plan, simulated. ``model`` is the result of the order search, None if it found no order that fits.
    ``named`` are the simulated plans under the plan's own schedule and under all named schedules that accept its
    stages, fastest first. ``name`` is the schedule whose order was chosen, "" if a new order is faster.
    """

    best: RankedPlan
    text: str
    model: FoundOrders | None
    named: tuple[RankedPlan, ...]
    name: str

    def explain(self) -> str:
        """Return one or two printable lines: the step time, and how far it may be from the shortest order."""
        fitting = [item for item in self.named if item.fits]
        step = f"{format_seconds(self.best.step_time_s)} per step"
        if self.name:
            words = f"No order was found that is faster than {self.name}, which the plan follows: {step}."
        elif fitting:
            share = 1 - self.best.step_time_s / fitting[0].step_time_s
            words = f"An order was found: {step}, {100 * share:.1f} % less than {fitting[0].plan.schedule} takes."
        else:
            which = "fits into memory" if self.named else "accepts these stages"
            words = f"An order was found: {step}. No named schedule {which}."
        if self.model is None:
            return words
        length_ps = self.model.named_ps.get(self.name) if self.name else self.model.length_ps
        if length_ps is None or not self.model.bound_ps:
            return words
        gap = length_ps / self.model.bound_ps - 1
        return f"{words}\nBy stage times alone, it is at most {100 * gap:.1f} % longer than the shortest order."


# The order is compared with every named schedule, and simulated:
#
#     stage_times    what the simulator charges for each stage              (simulator.stage_times)
#     limits         a rank's memory less what it holds besides microbatches, by the simulated named schedules
#     find_orders    the shortest order under the model of `program.order_search`
#     simulate       that order and every named schedule of this layout; the fastest that fits is the result
#
# So in the simulator, the result is never slower than the plan's own schedule or a named one that takes these stages
# and fits. The model of the search has no queues on links, so its order may be slower there. Then the plan follows the
# fastest named schedule by name, and the file still contains its order: the runtime bounds gradients in flight for
# named schedules only, so a file would need more memory. An order for stages on parallel branches depends on the
# branches, so its plan states which stages feed which.
def find_order(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    path: Path,
    *,
    cost: CostModel | None = None,
    whole: bool = False,
    memory: MemoryLimit | None = None,
    contention: Contention = "queued",
) -> FoundPlan:
    """Search for the fastest order of computation of a plan's stages, write it to ``path`` (.csv), and return the plan.

    The returned plan follows the file, or a named schedule if no faster order is found. ``whole``: do not split a
    backward into one for inputs and one for weights; the runtime, and plans with activations in host memory, need whole
    backwards. ``memory`` limits what the plan may use of a device. Raises PlanError if no order fits into memory, or if
    the plan is asynchronous, does not match the graph or the cluster, or is not for training.
    """
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    whole = whole or plan.offload.activations == "host"

    def evaluate(item: Plan) -> RankedPlan:
        return evaluate_plan(item, graph, cluster, cost, memory=memory, contention=contention)

    if plan.is_asynchronous:
        raise PlanError(
            f"The plan follows the schedule {plan.schedule}, which is asynchronous; orders are searched for "
            "synchronous schedules only. Give --schedule 1f1b, or another synchronous schedule."
        )
    branched = with_branches(plan, graph)
    times = stage_times(branched, graph, without_devices(cost, plan.idle))
    named = sorted(_named(plan, evaluate, whole=whole), key=lambda item: item.step_time_s)
    best, model = next((item for item in named if item.fits), None), None
    text = "" if best is None else write_orders(best.plan, compute_orders(best.plan)).text
    kept = np.asarray(times.kept_bytes, np.int64)
    memory = memory or MemoryLimit()
    limits = _limits(kept, named, [memory_limit(cluster, rank, memory) for rank in range(plan.num_ranks)])
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                found = find_orders(branched, replace(times, limit_bytes=limits), whole=whole)
            except PlanError:
                break
            orders = tuple(Order(rank=rank, columns=columns) for rank, columns in enumerate(found.columns))
            written = write_orders(branched, orders).text
            item = evaluate(with_schedule(branched, str(write_text(written, Path(folder) / f"{attempt}.csv"))))
            if item.fits:
                model = found
                if best is None or item.step_time_s < best.step_time_s:
                    best, text = item, written
                break
            excess = np.array(item.reserved_bytes) - np.array(item.memory_limit_bytes)
            limits = np.where(excess > 0, np.maximum(_held(kept, orders) - excess, 0), limits)
    if best is None:
        raise PlanError(
            f"No order of these stages fits into memory: {plan.describe()}. Choose smaller microbatches or more stages."
        )
    name = best.plan.schedule if best in named else ""
    write_text(text, path)
    if not name:
        best = replace(best, plan=with_schedule(branched, str(path)))
    return FoundPlan(best=best, text=text, model=model, named=tuple(named), name=name)


def _named(plan: Plan, evaluate: Callable[[Plan], RankedPlan], *, whole: bool) -> Iterator[RankedPlan]:
    """Evaluate the plan under every named schedule that takes its stages as they are, and under its own.

    With ``whole``, only schedules with whole backwards; of stages alone on a rank, only schedules made for such
    layouts.
    """
    others = [with_schedule(plan, name) for name in SCHEDULES if not whole or _is_made_for(name, plan)]
    for other in dict.fromkeys([*others, plan]):
        try:
            orders = compute_orders(other)
        except PlanError:
            continue
        if not whole or not any((order.columns.opcode == Opcode.BACKWARD_INPUT).any() for order in orders):
            yield evaluate(other)


def _is_made_for(name: str, plan: Plan) -> bool:
    """Return whether a schedule has its own order for this layout, rather than that of another schedule."""
    return plan.has_virtual_stages or layout_of(name) == "single"


def _limits(kept: NDArray[np.int64], named: Sequence[RankedPlan], limits: Sequence[int]) -> NDArray[np.int64]:
    """Return the bytes of microbatches that each rank may hold: its memory less the most that it holds besides."""
    besides = [np.array(item.peak_memory_bytes) - _held(kept, compute_orders(item.plan)) for item in named]
    most = np.max(besides, axis=0, initial=0) if besides else 0
    return np.maximum(np.array(limits, np.int64) - most, 0)


def _held(kept: NDArray[np.int64], orders: Sequence[Order]) -> NDArray[np.int64]:
    """Return the most bytes of microbatches that each rank holds at once, shape (ranks,)."""
    most = []
    for order in orders:
        opcode, stage = order.columns.opcode, order.columns.stage
        change = kept[stage] * ((opcode == Opcode.FORWARD).astype(np.int64) - np.isin(opcode, _RELEASING))
        most.append(int(np.cumsum(change).max(initial=0)))
    return np.array(most, np.int64)


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
    """A plan under one exchange (way to reduce gradients), simulated; ``name`` is that exchange."""

    name: str
    plan: Plan
    simulation: Simulation

    @property
    def step_time_s(self) -> float:
        """Seconds of a step in the steady state."""
        return self.simulation.step_time_s

    @property
    def computation_s(self) -> float:
        """Seconds of computation per step on the rank that computes longest."""
        return max(rank.busy_s for rank in self.simulation.ranks)

    @property
    def communication_s(self) -> float:
        """Seconds of gradient reduction per step, overlapped or not, on the rank with the longest."""
        return max(rank.exchange_s for rank in self.simulation.ranks)

    def row(self, own: ExchangedPlan) -> dict[str, Any]:
        """Return the results as a dict; ``own`` is the plan with its original exchange.

        Keys: ``exchange`` (the name), ``step_time_s``, ``gain_share`` (0.1: steps 10 % faster than those of ``own``),
        ``exposed_s`` (seconds of reduction that do not overlap with computation), ``peak_memory_bytes``. The last two
        are those of the rank with the largest value.
        """
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
    """The result of `compare_exchanges`: a plan with its own exchange (``own``) and with others, all simulated."""

    own: ExchangedPlan
    others: tuple[ExchangedPlan, ...]

    @property
    def computation_s(self) -> float:
        """Seconds of computation per step under the original plan, on the rank that computes longest."""
        return self.own.computation_s

    @property
    def communication_s(self) -> float:
        """Seconds of gradient reduction per step under the original plan, on the rank with the longest."""
        return self.own.communication_s

    @property
    def bound_s(self) -> float:
        """Lower bound, in seconds, of the step under all compared exchanges, in any order of the work."""
        ways = (self.own, *self.others)
        return max(min(item.computation_s for item in ways), min(item.communication_s for item in ways))

    @property
    def best(self) -> ExchangedPlan:
        """The fastest of the compared plans; the original plan in case of a tie."""
        return min((self.own, *self.others), key=lambda item: item.step_time_s)

    @property
    def gain(self) -> float:
        """Gain in throughput of the best exchange over the original plan: 0.1 means 10 % more steps per second."""
        return self.own.step_time_s / self.best.step_time_s - 1

    @property
    def is_worth_it(self) -> bool:
        """True if the gain is at least `WORTH_IT`, the error of the predictions."""
        return self.gain >= WORTH_IT

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per compared exchange (`ExchangedPlan.row`), that of the original plan first."""
        return [item.row(self.own) for item in (self.own, *self.others)]

    def explain(self) -> str:
        """Return the bound and the recommendation in a few sentences."""
        bound = (
            f"No compared exchange beats {format_seconds(self.bound_s)}; as planned, computing takes "
            f"{format_seconds(self.computation_s)}, moving gradients {format_seconds(self.communication_s)}."
        )
        if self.is_worth_it:
            return f"{bound} Worth it: {self.best.name}, {format_percent(self.gain)} faster than the plan as it is."
        gain = f"{format_percent(self.gain)} by {self.best.name}" if self.best is not self.own else "nothing"
        return f"{bound} Stay with the plan: {gain} can be gained. {self._reason()}"

    def _reason(self) -> str:
        exposed_s = max(rank.exposed_exchange_s for rank in self.own.simulation.ranks)
        if exposed_s < WORTH_IT * self.own.step_time_s:
            return f"Its exchange overlaps with the backward, except for {format_seconds(exposed_s)}."
        if self.communication_s > self.computation_s:
            return "The links are busy nearly all the time: only fewer bytes or faster links help, not another order."
        return "The gradients that are ready last are needed first, so nothing can overlap with their reduction."


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
    """Simulate a plan with its own and with other exchanges (ways to reduce gradients).

    ``names`` are those of `EXCHANGE_NAMES`; ``own_orders`` are your own functions, each with a name, that order the
    parts of gradients. Exchanges that do not apply to the plan are left out. Raises PlanError for unknown names, and
    for plans that are asynchronous, have ZeRO 2 or 3, offload, or reduce no gradients.
    """
    unknown = next((name for name in names if name not in EXCHANGE_NAMES), None)
    if unknown is not None:
        raise PlanError(
            f"Unknown exchange {unknown!r}{suggest(unknown, EXCHANGE_NAMES)}; expected "
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
    """Return the plan, simulated, with its gradients reduced in the user's order.

    ``order`` is the user's function. All `PART_BYTES` are tried as sizes of the parts; the result has the shortest
    step. The reduction ends within the step, as the runtime requires. Raises PlanError in the same cases as
    `compare_exchanges`, and for plans with ZeRO.
    """
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    if plan.exchange.zero:
        raise PlanError(
            f"An order of your own was given for a plan with zero = {plan.exchange.zero}, which sums whole buckets; "
            "expected plain all-reduces. Plan with --zero 0."
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
    """Return a plan of one stage with a stage per layer (or per few layers, at most 64 stages) on the same ranks.

    A plan with several stages, a single layer or your own schedule is returned unchanged.
    """
    count = min(len(graph.layers), _MOST_STAGES)
    if len(plan.stages) > 1 or count == 1 or plan.has_own_schedule:
        return plan
    ends = [len(graph.layers) * i // count for i in range(count + 1)]
    stages = tuple(StagePlan(start=start, stop=stop, ranks=plan.stages[0].ranks) for start, stop in pairwise(ends))
    return replace(plan, stages=stages, schedule="interleaved")


def _check_exchanges(plan: Plan, graph: Graph) -> None:
    if plan.is_asynchronous:
        raise PlanError(
            f"Exchanges cannot be compared under the schedule {plan.schedule}, which is asynchronous; expected a "
            "synchronous one, such as 1f1b."
        )
    if plan.exchange.policy:
        raise PlanError(
            f"Exchanges cannot be compared for a plan that follows the exchange policy {plan.exchange.policy}; "
            "expected sums of gradients. Plan without --exchange."
        )
    if plan.exchange.zero >= 2:
        raise PlanError(
            f"Exchanges cannot be compared for a plan with zero = {plan.exchange.zero}, whose gradients are scattered "
            "during the backward; expected zero 0 or 1. Plan with --zero 1, or without."
        )
    if plan.offload != ON_DEVICE:
        raise PlanError(
            f"Exchanges cannot be compared for a plan that keeps {plan.offload.describe()}, which not all exchanges "
            "support; expected everything on the devices. Plan without --offload."
        )
    if graph.mode != "training" or not gradient_buckets(graph, plan):
        raise PlanError(
            "Exchanges cannot be compared for a plan that exchanges no gradients; expected a stage with several "
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
