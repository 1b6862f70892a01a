"""``meshwright simulate --scenario``: what a scenario changes, beside the same plan without it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.spec.errors import DocumentError
from meshwright.spec.scenario import Scenario, compose, load_scenario
from meshwright.spec.units import format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import CostModel
    from meshwright.simulator import Contention, Simulation
    from meshwright.simulator.scenarios import StepTimes
    from meshwright.spec.graph import Graph
    from meshwright.spec.placement import Placement
    from meshwright.spec.plan import Plan

ScenarioOption = Annotated[
    list[str] | None,
    typer.Option(help="What happens meanwhile: a .toml file, or a shipped scenario by name; repeat to put one on top."),
]
SeedsOption = Annotated[int, typer.Option(help="Under a scenario with jitter or failures: how many seeds.", min=1)]


def load_scenarios(references: Sequence[str] | None) -> Scenario:
    """One scenario of all that were named, in their order."""
    return compose([load_scenario(reference) for reference in references or ()])


def follow_scenario(
    scenario: Scenario,
    result: Simulation,
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    cost: CostModel,
    contention: Contention,
    num_steps: int,
    num_seeds: int,
) -> tuple[Simulation, dict[str, Any], tuple[Any, ...]]:
    """What a scenario does to a plan that was simulated on its machines: the timeline, facts, and what is printed.

    Nothing without a scenario. Under jitter the timeline is that of the scenario's own seed.
    """
    from meshwright.report import describe_scenario, make_table
    from meshwright.simulator import simulate_plan
    from meshwright.simulator.scenarios import JitteredSteps, has_jitter

    if not scenario.effects:
        return result, {}, ()
    words = describe_scenario(scenario)
    before_s = simulate_plan(plan, graph, usual.cluster, cost=usual, contention=contention).step_time_s
    facts: dict[str, Any] = {"name": scenario.name, "effects": words, "step_time_without_s": before_s}
    printed: list[Any] = [_compare(scenario.name, words, result.step_time_s, before_s)]
    if has_jitter(scenario):
        if result.simulated_ops is not None:
            raise DocumentError("`--detail ops` shows ops at their typical times; leave it out under jitter.")
        jittered = JitteredSteps(plan, graph, cost, scenario, contention=contention)
        times = jittered.time_steps(num_seeds=num_seeds)
        result = replace(result, simulated=jittered.timeline(num_steps), fold=None)
        facts["steps"] = times.rows()
        printed += [_told(times), make_table([_shown(times)])]
    return result, facts, tuple(printed)


def _compare(name: str, words: str, step_s: float, before_s: float) -> str:
    change = "the same" if step_s == before_s else f"{_signed(step_s / before_s - 1)}"
    return (
        f"Scenario{f' {name}' if name else ''}: {words}. A steady step takes {format_seconds(step_s)}, without the "
        f"scenario {format_seconds(before_s)}: {change}."
    )


def _told(times: StepTimes) -> str:
    seeds, steps = times.seconds.shape
    return f"Under jitter, {steps} steps for each of {format_count(seeds, 'seed')}:"


def _shown(times: StepTimes) -> dict[str, Any]:
    return {key: value for key, value in times.rows().items() if not key.startswith("num")}


def _signed(share: float) -> str:
    return f"{'+' if share > 0 else '−'} {format_percent(abs(share))}"
