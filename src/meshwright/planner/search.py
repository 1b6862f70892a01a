"""Search for plans: methods propose plans, the simulator evaluates them, and the best are kept.

search_plans  →  find_method   (exact slicing, or another one: `methods`)
              →  run           (simulate each proposal and send the result, until the method or the time ends)
              →  Plans         (ranked; explain, why_not, lower bound)

Step time and memory of every plan are simulated, whichever method proposed it, so that methods are comparable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

import numpy as np

from meshwright.planner.diagnosis import raise_infeasible, require_possible
from meshwright.planner.evaluate import (
    RankedPlan,
    StepInterval,
    evaluate_plan,
    predict_latency,
    predict_makespan,
    predict_step_interval,
)
from meshwright.planner.methods import check_shard_sizes, find_method
from meshwright.planner.methods.grid import grid
from meshwright.planner.methods.slicing import slicing
from meshwright.planner.plans import Coverage, Plans
from meshwright.planner.prices import price_plan
from meshwright.planner.problem import Problem
from meshwright.planner.ranking import rank_plans
from meshwright.planner.search_method import Limits, Method, Proposal, SearchState, checked
from meshwright.spec import (
    DeadlockError,
    Graph,
    MeshwrightError,
    NullSink,
    Plan,
    PlanError,
    ScheduleError,
    format_count,
    format_seconds,
    with_branches,
)
from meshwright.spec.recompute import is_by_stage

DEFAULT_METHOD = "auto"


class _UnlikeRequestError(PlanError):
    """A proposed plan differs from the request; the message names the properties that differ, but not the plan."""


def search_plans(problem: Problem, method: str | Method = DEFAULT_METHOD, limits: Limits | None = None) -> Plans:
    """Return the best plans of a problem: faster ones first, among equally fast plans those with less memory.

    ``method`` is the name of a method (`methods`), a reference to your own (``path/to/file.py:function``), or your own
    function. In inference, the fastest plan has the highest throughput among the plans that answer a microbatch within
    ``problem.max_latency_s``. With the aim latency, plans are ranked by the time to answer a batch that arrives at
    once, and may leave devices idle.

    Raises PlanError for an invalid problem, or if a deadline or the method prevented a result. Raises
    NoFeasiblePlanError if no plan fits into memory; its message names the limiting resource and the cheapest change
    that makes a plan fit. Raises ScheduleError or DeadlockError if your own schedules work for none of the tried plans.
    """
    limits = limits or Limits()
    require_possible(problem)
    begun = time.monotonic()
    state = SearchState(
        max_plans=limits.max_plans,
        random=np.random.default_rng(limits.seed),
        events=limits.events or NullSink(),
        stop_at=math.inf if limits.deadline_s is None else begun + limits.deadline_s,
    )
    if problem.aim == "latency" and method == DEFAULT_METHOD:
        method = "latency"
    name, steps = (method, find_method(method)) if isinstance(method, str) else (_name_of(method), checked(method))
    check_shard_sizes(name, problem.choices.shard_sizes)
    log = _Log(problem, state)
    stopped = log.run(steps)
    if not state.fitting:
        _raise_nothing_found(log, name, stopped, is_exact=steps is slicing)
    coverage = Coverage(
        method=name,
        seed=limits.seed,
        num_considered=max(state.num_considered, log.num_simulated),
        num_pruned=state.num_pruned,
        num_simulated=log.num_simulated,
        stopped=stopped,
        seconds=time.monotonic() - begun,
    )
    return Plans(
        # With a deadline, a result in time is worth more than intervals of all plans.
        ranked=rank_plans(state.fitting, limits.max_plans, None if limits.deadline_s else log.predict_interval),
        rejected=tuple(state.rejected),
        refused=tuple((plan, str(error)) for plan, error in state.refused),
        coverage=coverage,
        evaluate=log.evaluate,
        predict_interval=log.predict_interval,
        front=find_front(state.fitting),
        bound_s=state.proven_s if problem.aim == "throughput" else 0.0,
        is_bound_of_rules=problem.has_own_placements,
        notes=tuple(state.notes),
    )


def _raise_nothing_found(log: _Log, method: str, stopped: str, *, is_exact: bool) -> NoReturn:
    """Raise the error that says why a search ended without a plan that fits."""
    problem, state = log.problem, log.state
    if log.too_slow:
        latency_s, plan = min(log.too_slow, key=lambda pair: pair[0])
        raise PlanError(
            f"No plan answers a microbatch within {format_seconds(problem.max_latency_s or 0.0)}. The fastest of "
            f"{format_count(len(log.too_slow), 'plan')} that were tried, {plan.describe()}, takes "
            f"{format_seconds(latency_s)}. Allow smaller microbatches, split ops over devices, or allow more time."
        )
    if state.refused and not state.rejected:
        plan, error = state.refused[0]
        if isinstance(error, _UnlikeRequestError):
            raise PlanError(f"The method {method} proposes no plan as requested. The first, {plan.describe()}: {error}")
        raise error
    if stopped or state.is_over:
        raise PlanError(
            f"No plan that fits was found before {stopped or 'the deadline'} ended the search. Allow more time."
        )
    if not is_exact and _best_of(problem) is not None:
        raise PlanError(
            f"The method {method} proposes no plan that fits into memory, although such plans exist. Use another "
            f"method, such as {DEFAULT_METHOD}."
        )
    raise_infeasible(problem, state.rejected, log.evaluate, _best_of)


class _Log:
    """The results of all proposals of one search."""

    def __init__(self, problem: Problem, state: SearchState) -> None:
        self.problem, self.state = problem, state
        self._known: dict[Plan, RankedPlan | None] = {}
        self.too_slow: list[tuple[float, Plan]] = []

    @property
    def num_simulated(self) -> int:
        """The number of distinct plans that were simulated."""
        return sum(item is not None for item in self._known.values())

    def run(self, method: Method) -> str:
        """Simulate the plans that a method proposes.

        Return what ended the method early ("the deadline" or "an interrupt"), "" if it ended by itself.
        """
        steps, result = method(self.problem, self.state), None
        try:
            proposal = next(steps)
            while True:
                result = self._look(proposal)
                if self.state.is_over:
                    return "the deadline"
                proposal = steps.send(result)
        except StopIteration:
            return ""
        except KeyboardInterrupt:
            if not self.state.fitting:
                raise
            return "an interrupt"
        finally:
            steps.close()

    def evaluate(self, plan: Plan, estimate_s: float | None = None, *, only_fitting: bool = False) -> RankedPlan:
        """Simulate a plan and return its prediction, with its price if the problem has prices.

        Raises PlanError if the plan does not match the graph or the cluster.
        """
        problem = self.problem
        graph = problem.graph_for(plan.microbatch_size)
        item = evaluate_plan(
            _branched(plan, graph),
            graph,
            problem.cluster,
            problem.cost,
            memory=problem.memory,
            estimate_s=estimate_s,
            only_fitting=only_fitting,
        )
        price = price_plan(plan, item.step_time_s, problem.cluster, problem.prices)
        return item if price is None else replace(item, price=price)

    def _within_latency(self, item: RankedPlan) -> RankedPlan:
        """Return the plan with its latency. Raises PlanError if it is too long."""
        problem, plan = self.problem, item.plan
        assert problem.max_latency_s is not None
        graph = problem.graph_for(plan.microbatch_size)
        latency_s = predict_latency(plan, graph, problem.cluster, problem.cost)
        if latency_s > problem.max_latency_s:
            self.too_slow.append((latency_s, plan))
            raise PlanError(
                f"it answers a microbatch in {format_seconds(latency_s)}, which is more than the "
                f"{format_seconds(problem.max_latency_s)} that are allowed."
            )
        return replace(item, latency_s=latency_s)

    def _makespan(self, plan: Plan) -> float:
        problem = self.problem
        return predict_makespan(plan, problem.graph_for(plan.microbatch_size), problem.cluster, problem.cost)

    def predict_interval(self, plan: Plan) -> StepInterval:
        """Return the 80 % interval of a plan's step time."""
        problem = self.problem
        return predict_step_interval(plan, problem.graph_for(plan.microbatch_size), problem.cluster, problem.cost)

    def _look(self, proposal: Proposal) -> RankedPlan | None:
        plan = proposal.plan
        if plan in self._known:
            return self._known[plan]
        try:
            if proposal.counts and (objection := self.problem.objection(plan)):
                raise _UnlikeRequestError(f"The options do not allow its {objection}.")
            # Closed forms exist for named schedules only.
            item = self.evaluate(plan, None if plan.has_own_schedule else proposal.estimate_s, only_fitting=True)
            if self.problem.max_latency_s is not None and item.fits:
                item = self._within_latency(item)
            if self.problem.aim == "latency":
                item = replace(item, makespan_s=self._makespan(plan))
        except (PlanError, ScheduleError, DeadlockError) as error:
            self.state.refused.append((plan, error))
            self._known[plan] = None
            return None
        setting = self.problem.setting_of(plan)
        if setting is None:
            # Bounds do not cover a method's own placements.
            self.state.are_bounds_void = True
        else:
            item = replace(item, recompute=setting.recompute)
            # Bounds use one cost for each range of layers, whichever stage it is, so a word per stage voids them.
            self.state.are_bounds_void |= is_by_stage(setting.recompute)
        self._known[plan] = item
        if not item.fits:
            self.state.rejected.append(item)
        elif proposal.counts:
            self.state.fitting.append(item)
            if self.state.best is None or item.aimed_s < self.state.best.aimed_s:
                self.state.best = item
                self.state.events.metric("best_step_s", item.aimed_s, self.num_simulated)
        return item


def _best_of(problem: Problem) -> RankedPlan | None:
    """Return the best plan of a problem by exact slicing, or of many settings the best uniform plan.

    None if nothing fits or no layout is possible.
    """
    problem, state = replace(problem, max_latency_s=None), SearchState(max_plans=1)
    log = _Log(problem, state)
    try:
        log.run(grid if problem.is_wide else slicing)
    except MeshwrightError:
        return None
    return state.best


def find_front(items: Iterable[RankedPlan]) -> tuple[RankedPlan, ...]:
    """Return the Pareto front of step time, reserved memory of the fullest rank, and price per step, fastest first.

    Without prices, devices times step time replaces the price.
    """
    front: list[RankedPlan] = []
    for item in sorted(items, key=_figures):
        mine = _figures(item)
        if not any(all(a <= b for a, b in zip(_figures(other), mine, strict=True)) for other in front):
            front.append(item)
    return tuple(front)


def _figures(item: RankedPlan) -> tuple[float, float, float]:
    price = item.device_seconds if item.price is None else item.price.per_step
    return item.step_time_s, max(item.reserved_bytes), price


def _branched(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with its branches stated, where that can only help.

    With replicated stages a longer chain keeps more microbatches in flight, and ranks that alternate wait less.
    """
    has_replicas = any(len(stage.ranks) > 1 for stage in plan.stages)
    return plan if has_replicas or plan.graph_hash != graph.content_hash else with_branches(plan, graph)


def _name_of(method: Method) -> str:
    return getattr(method, "__name__", type(method).__name__)
