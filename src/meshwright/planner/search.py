"""Search for plans: methods propose, the simulator decides, the best are kept.

search_plans  →  find_method   (exact slicing, or another one: `methods`)
              →  run           (simulate what the method proposes and tell it the result, until it or the time is over)
              →  Plans         (ranked; explain, why_not, lower bound)

Step time and memory of every plan are simulated, whoever proposed it, so that methods compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from meshwright.cost import CostModel
from meshwright.planner.adoption import DEFAULT_CHUNKS
from meshwright.planner.diagnosis import raise_infeasible, require_possible
from meshwright.planner.evaluate import RankedPlan, evaluate_plan, predict_latency, predict_makespan
from meshwright.planner.interval import StepInterval, predict_step_interval
from meshwright.planner.method import Method, Proposal, SearchState, checked
from meshwright.planner.methods import find_method
from meshwright.planner.methods.slicing import slicing
from meshwright.planner.plans import Coverage, Plans
from meshwright.planner.prices import price_plan, within_budget
from meshwright.planner.problem import Aim, Choices, Problem
from meshwright.program import OwnSchedule, name_schedule
from meshwright.spec import (
    Cluster,
    DeadlockError,
    EventSink,
    GradientExchange,
    Graph,
    MeshwrightError,
    NullSink,
    Offload,
    Plan,
    PlanError,
    ScheduleError,
    Workload,
    format_count,
    format_seconds,
    with_branches,
)
from meshwright.spec.exchange import WAVES, ZeroStage
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.plan import BASIC_SCHEDULES
from meshwright.spec.scenario import Scenario
from meshwright.spec.sharding import UNSHARDED, Sharding

DEFAULT_METHOD = "auto"


def search_plans(
    graph_for: Callable[[int], Graph],
    cluster: Cluster,
    workload: Workload,
    *,
    cost: CostModel | None = None,
    model: str = "",
    model_sizes: tuple[tuple[str, int], ...] = (),
    method: str | Method = DEFAULT_METHOD,
    num_devices: int | Sequence[int] | None = None,
    num_stages: int | Sequence[int] | None = None,
    num_chunks: int | Sequence[int] = DEFAULT_CHUNKS,
    microbatch_sizes: Sequence[int] | None = None,
    schedules: Sequence[str | OwnSchedule] = BASIC_SCHEDULES,
    shardings: Sequence[Sharding] = (UNSHARDED,),
    zero: Sequence[ZeroStage] = (),
    recompute: Sequence[str] = ("none",),
    offload: Sequence[Offload] = (ON_DEVICE,),
    exchange: GradientExchange | None = None,
    memory_limit_bytes: int | None = None,
    aim: Aim = "throughput",
    max_latency_s: float | None = None,
    prices: Scenario | None = None,
    max_price_per_hour: float | None = None,
    max_plans: int = 8,
    deadline_s: float | None = None,
    seed: int = 0,
    events: EventSink | None = None,
) -> Plans:
    """The best plans for a model on a cluster, fastest predicted step first.

    ``graph_for`` gives the graph for a microbatch size (the same one if its sizes are symbolic). What plans may choose
    among is given as sequences: numbers of devices (default: the whole cluster, all of which a plan uses), of stages,
    of stages on a rank (``num_chunks``, under schedules that deal them out in turn), ``microbatch_sizes`` (default:
    divisors of the global batch), ``schedules`` (names, references ``path/to/file.py:function``, such functions
    themselves, or files of orders), ``shardings``, stages of ZeRO (default: that of the ``exchange``), ``recompute`` in
    words or layers, and what ``offload`` keeps away from devices.
    ``memory_limit_bytes`` replaces every device's memory. In inference the step is that of the whole batch, so that the
    fastest one has the highest throughput, of those plans that answer a microbatch within ``max_latency_s``; with the
    ``aim`` latency the best one answers a batch that arrives at once soonest, and may leave devices out. ``prices`` of
    a scenario say what plans cost; of those that cost more than ``max_price_per_hour`` none is looked at: without
    numbers of devices, as many as the money pays for, powers of two and whole nodes. ``method`` is the name of one
    (`methods`), a reference to your own, or such a function. At most ``max_plans`` plans are returned. The same input
    and ``seed`` give the same plans in the same order, unless ``deadline_s`` seconds or an interrupt end the search,
    which then returns what it has. ``model``, ``model_sizes`` and the cluster's name are noted in the plans.

    Raises PlanError for an argument out of range, NoFeasiblePlanError if nothing fits; its message names the
    constraint that binds and what would make a plan possible. Raises ScheduleReferenceError for what is no schedule,
    ScheduleError or DeadlockError if own schedules order none of the plans that were tried.
    """
    if max_plans < 1:
        raise PlanError(f"At most {max_plans} plans were asked for; ask for at least 1.")
    if deadline_s is not None and not deadline_s > 0:
        raise PlanError(f"A deadline of {deadline_s} s was given; expected a positive number of seconds.")
    if aim == "latency" and workload.kind != "inference":
        raise PlanError(
            f"The least latency was asked for, for {workload.kind}; expected inference, whose batches are answered. "
            "Give such a workload, or aim at throughput."
        )
    if max_latency_s is not None and (workload.kind != "inference" or not max_latency_s > 0):
        raise PlanError(
            f"A latency of at most {max_latency_s} s was asked for, for {workload.kind}; expected a positive number, "
            "for inference. Leave it out, or give such a workload."
        )
    counts = _some(num_devices)
    if max_price_per_hour is not None:
        counts = within_budget(counts, cluster, prices or Scenario(), max_price_per_hour)
    named = dict(name_schedule(schedule) for schedule in schedules)
    exchange, prices = exchange or GradientExchange(), prices or Scenario()
    _require_waves(exchange, named)
    problem = Problem(
        graph_for=graph_for,
        cluster=cluster,
        workload=workload,
        cost=cost or CostModel(cluster=cluster, precision=workload.precision),
        choices=Choices(
            num_devices=counts,
            num_stages=_some(num_stages),
            num_chunks=_some(num_chunks),
            microbatch_sizes=_given("microbatch sizes", microbatch_sizes),
            schedules=tuple(named),
            schedule_hashes=named,
            shardings=tuple(shardings),
            zero=tuple(zero) or (exchange.zero,),
            recompute=tuple(recompute),
            offload=tuple(offload),
        ),
        exchange=exchange,
        memory_limit_bytes=memory_limit_bytes,
        aim=aim,
        may_idle=aim == "latency",
        max_latency_s=max_latency_s,
        prices=prices,
        model=model,
        model_sizes=model_sizes,
    )
    return solve(problem, method, max_plans=max_plans, deadline_s=deadline_s, seed=seed, events=events)


def solve(
    problem: Problem,
    method: str | Method = DEFAULT_METHOD,
    *,
    max_plans: int = 8,
    deadline_s: float | None = None,
    seed: int = 0,
    events: EventSink | None = None,
) -> Plans:
    """Search a problem by a method; arguments and errors as of `search_plans`."""
    require_possible(problem)
    events = events or NullSink()
    begun = time.monotonic()
    state = SearchState(max_plans=max_plans, random=np.random.default_rng(seed), events=events)
    if deadline_s is not None:
        state.stop_at = begun + deadline_s
    if problem.aim == "latency" and method == DEFAULT_METHOD:
        method = "latency"
    name, steps = (method, find_method(method)) if isinstance(method, str) else (_name_of(method), checked(method))
    log = _Log(problem, state)
    stopped = log.run(steps)
    if not state.fitting:
        if log.too_slow:
            latency_s, plan = min(log.too_slow, key=lambda pair: pair[0])
            raise PlanError(
                f"No plan answers a microbatch within {format_seconds(problem.max_latency_s or 0.0)}. The quickest of "
                f"{format_count(len(log.too_slow), 'plan')} that were tried, {plan.describe()}, takes "
                f"{format_seconds(latency_s)}. Allow smaller microbatches, split ops over devices, or allow more time."
            )
        if state.refused and not log.rejected:
            raise state.refused[0][1]
        if stopped or state.is_over:
            raise PlanError(
                f"No plan that fits was found before {stopped or 'the deadline'} ended the search. Give it more time."
            )
        if steps is not slicing and _has_plan(problem):
            raise PlanError(
                f"The method {name} proposes no plan that fits, though there are some. Take another one, as "
                f"{DEFAULT_METHOD}."
            )
        raise_infeasible(problem, log.rejected, log.evaluate, _has_plan)
    ranked = sorted(state.fitting, key=lambda item: item.aimed_s)
    return Plans(
        ranked=tuple(ranked[:max_plans]),
        rejected=tuple(log.rejected),
        refused=tuple((plan, str(error)) for plan, error in state.refused),
        coverage=Coverage(
            method=name,
            seed=seed,
            num_considered=max(state.num_considered, log.num_simulated),
            num_pruned=state.num_pruned,
            num_simulated=log.num_simulated,
            stopped=stopped,
            seconds=time.monotonic() - begun,
        ),
        evaluate=log.evaluate,
        predict_interval=log.predict_interval,
        front=find_front(ranked),
        bound_s=state.proven_s if problem.aim == "throughput" else 0.0,
        is_bound_of_rules=problem.has_own_placements,
        notes=tuple(state.notes),
    )


class _Log:
    """What came of all proposals of one search."""

    def __init__(self, problem: Problem, state: SearchState) -> None:
        self._problem, self._state = problem, state
        self._known: dict[Plan, RankedPlan | None] = {}
        self.rejected: list[RankedPlan] = []
        self.too_slow: list[tuple[float, Plan]] = []

    @property
    def num_simulated(self) -> int:
        """Distinct plans that were simulated."""
        return sum(item is not None for item in self._known.values())

    def run(self, method: Method) -> str:
        """Simulate what a method proposes; says what ended it early, if anything did."""
        steps, result = method(self._problem, self._state), None
        try:
            proposal = next(steps)
            while True:
                result = self._look(proposal)
                if self._state.is_over:
                    return "the deadline"
                proposal = steps.send(result)
        except StopIteration:
            return ""
        except KeyboardInterrupt:
            if not self._state.fitting:
                raise
            return "an interrupt"
        finally:
            steps.close()

    def evaluate(self, plan: Plan, estimate_s: float | None = None) -> RankedPlan:
        """Simulate a plan. Raises PlanError if it is not for this graph and cluster."""
        problem = self._problem
        graph = problem.graph_for(plan.microbatch_size)
        item = evaluate_plan(
            _branched(plan, graph),
            graph,
            problem.cluster,
            problem.cost,
            memory_limit_bytes=problem.memory_limit_bytes,
            estimate_s=estimate_s,
        )
        price = price_plan(plan, item.step_time_s, problem.cluster, problem.prices)
        return item if price is None else replace(item, price=price)

    def _within_latency(self, item: RankedPlan) -> RankedPlan:
        """The plan with its latency. Raises PlanError where that is too long."""
        problem, plan = self._problem, item.plan
        assert problem.max_latency_s is not None
        graph = problem.graph_for(plan.microbatch_size)
        latency_s = predict_latency(plan, graph, problem.cluster, problem.cost)
        if latency_s > problem.max_latency_s:
            self.too_slow.append((latency_s, plan))
            raise PlanError(
                f"it answers a microbatch in {format_seconds(latency_s)}, which is more than the "
                f"{format_seconds(problem.max_latency_s)} that were asked for."
            )
        return replace(item, latency_s=latency_s)

    def _makespan(self, plan: Plan) -> float:
        problem = self._problem
        return predict_makespan(plan, problem.graph_for(plan.microbatch_size), problem.cluster, problem.cost)

    def predict_interval(self, plan: Plan) -> StepInterval:
        """The interval of a plan's step time."""
        problem = self._problem
        return predict_step_interval(plan, problem.graph_for(plan.microbatch_size), problem.cluster, problem.cost)

    def _look(self, proposal: Proposal) -> RankedPlan | None:
        plan = proposal.plan
        if plan in self._known:
            return self._known[plan]
        try:
            if proposal.counts and (objection := self._problem.objection(plan)):
                raise PlanError(f"{plan.describe()} has another {objection} than was asked for.")
            # Closed forms know the named schedules only.
            item = self.evaluate(plan, None if plan.has_own_schedule else proposal.estimate_s)
            if self._problem.max_latency_s is not None and item.fits:
                item = self._within_latency(item)
            if self._problem.aim == "latency":
                item = replace(item, makespan_s=self._makespan(plan))
        except (PlanError, ScheduleError, DeadlockError) as error:
            self._state.refused.append((plan, error))
            self._known[plan] = None
            return None
        self._known[plan] = item
        if self._problem.setting_of(plan) is None:
            # Placements of a method's own are no choice that bounds know of.
            self._state.are_bounds_void = True
        if not item.fits:
            self.rejected.append(item)
        elif proposal.counts:
            self._state.fitting.append(item)
            if self._state.best is None or item.aimed_s < self._state.best.aimed_s:
                self._state.best = item
        return item


def _has_plan(problem: Problem) -> bool:
    """Whether any plan of a problem fits."""
    problem, state = replace(problem, max_latency_s=None), SearchState(max_plans=1)
    log = _Log(problem, state)
    try:
        log.run(slicing)
    except MeshwrightError:
        return False
    return state.best is not None


def find_front(items: Iterable[RankedPlan]) -> tuple[RankedPlan, ...]:
    """Those of which none is better in step time, peak memory and price at once, fastest first.

    Without prices devices cost alike.
    """
    front: list[RankedPlan] = []
    for item in sorted(items, key=_figures):
        mine = _figures(item)
        if not any(all(a <= b for a, b in zip(_figures(other), mine, strict=True)) for other in front):
            front.append(item)
    return tuple(front)


def _figures(item: RankedPlan) -> tuple[float, float, float]:
    price = item.device_seconds if item.price is None else item.price.per_step
    return item.step_time_s, max(item.peak_memory_bytes), price


def _branched(plan: Plan, graph: Graph) -> Plan:
    """The plan with its branches written down, where that can only help.

    Where stages have several replicas, a longer chain keeps more under way, and ranks that take turns wait less.
    """
    has_replicas = any(len(stage.ranks) > 1 for stage in plan.stages)
    return plan if has_replicas or plan.graph_hash != graph.content_hash else with_branches(plan, graph)


def _require_waves(exchange: GradientExchange, schedules: Collection[str]) -> None:
    if exchange.staleness and WAVES not in schedules:
        raise PlanError(
            f"A staleness of {exchange.staleness} waves was given for {' and '.join(schedules)}; only {WAVES} has "
            "waves. Leave it out, or ask for that schedule too."
        )


def _some(given: int | Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


def _given(what: str, values: Sequence[int] | None) -> tuple[int, ...]:
    if values is not None and not values:
        raise PlanError(f"No {what} were given; give at least one, or leave them out.")
    return tuple(values or ())


def _name_of(method: Method) -> str:
    return getattr(method, "__name__", type(method).__name__)
