"""``meshwright simulate --scenario``: the effect of a scenario, compared with the same plan without it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.spec.errors import DocumentError
from meshwright.spec.scenario import Scenario, compose, load_scenario
from meshwright.spec.units import format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import CostModel
    from meshwright.simulator import Contention, Simulation
    from meshwright.simulator.scenarios import Replan
    from meshwright.spec.graph import Graph
    from meshwright.spec.placement import Placement
    from meshwright.spec.plan import Plan


def load_scenarios(references: Sequence[str] | None) -> Scenario:
    """Load all named scenarios into one, in their order."""
    return compose([load_scenario(reference) for reference in references or ()])


def planner_for(plan: Plan | Placement, graph: Graph) -> Replan | None:
    """The function that replans if a scenario loses devices; None for a placement of every op."""
    from meshwright.planner import replan_seconds
    from meshwright.spec.placement import Placement

    return None if isinstance(plan, Placement) else partial(replan_seconds, plan, graph)


def follow_scenario(
    scenario: Scenario,
    result: Simulation,
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    contention: Contention,
    num_steps: int,
    settings: dict[str, Any],
) -> tuple[Simulation, dict[str, Any], tuple[Any, ...]]:
    """Apply a scenario to a simulated plan: return the timeline, facts, and what is printed.

    ``settings`` are those of `simulate_scenario` for runs and seeds. Returns nothing new without a scenario or a run.
    Under jitter the timeline is that of the scenario's own seed.
    """
    from meshwright.report import (
        describe_missing_rates,
        describe_price,
        describe_run,
        describe_scenario,
        make_table,
    )
    from meshwright.simulator import simulate_plan
    from meshwright.simulator.scenarios import JitteredSteps, apply_scenario, simulate_scenario
    from meshwright.spec.plan import Plan
    from meshwright.spec.used_devices import used_of

    if not scenario.effects and settings["run_steps"] is None:
        return result, {}, ()
    replan = planner_for(plan, graph)
    outcome = simulate_scenario(
        plan, graph, usual, scenario, result=result, contention=contention, replan=replan, **settings
    )
    facts, printed = dict[str, Any](), list[Any]()
    if scenario.effects:
        words = describe_scenario(scenario)
        before_s = simulate_plan(plan, graph, usual.cluster, cost=usual, contention=contention).step_time_s
        facts = {"name": scenario.name, "effects": words, "step_time_without_s": before_s}
        printed.append(Text(_compare(scenario.name, words, result.step_time_s, before_s)))
        machine = apply_scenario(usual, scenario).cluster
        machine = used_of(plan, machine) if isinstance(plan, Plan) else machine
        if remark := describe_missing_rates(machine, plan.num_devices, plan.workload.precision):
            facts["remark"] = remark
            printed.append(Text(remark))
    if outcome.steps is not None:
        if result.simulated_ops is not None:
            raise DocumentError("`--detail ops` shows ops at their typical times; leave it out under jitter.")
        cost = apply_scenario(usual, scenario)
        noisy = JitteredSteps(plan, graph, cost, scenario, contention=contention).timeline(num_steps)
        result = replace(result, simulated=noisy, fold=None)
        facts["steps"] = rows = outcome.steps.rows()
        seeds, steps = outcome.steps.seconds.shape
        printed.append(Text(f"Under jitter, {steps} steps for each of {format_count(seeds, 'seed')}:"))
        printed.append(make_table([{key: value for key, value in rows.items() if not key.startswith("num")}]))
    if outcome.run is not None:
        facts["run"] = outcome.run.row()
        printed.append(Text(describe_run(facts["run"], len(outcome.run.runs))))
    if outcome.price:
        facts["price"] = outcome.price
        printed.append(Text(describe_price(outcome.price)))
    return result, facts, tuple(printed)


def _compare(name: str, words: str, step_s: float, before_s: float) -> str:
    change = "the same" if step_s == before_s else _signed(step_s / before_s - 1)
    return (
        f"Scenario{f' {name}' if name else ''}: {words}. A steady step takes {format_seconds(step_s)}, without the "
        f"scenario {format_seconds(before_s)}: {change}."
    )


def _signed(share: float) -> str:
    return f"{'+' if share > 0 else '−'} {format_percent(abs(share))}"
