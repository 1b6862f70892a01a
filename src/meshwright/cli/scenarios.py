"""``meshwright simulate --scenario``: what a scenario changes, beside the same plan without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.spec.scenario import Scenario, compose, load_scenario
from meshwright.spec.units import format_percent, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import CostModel
    from meshwright.simulator import Contention, Simulation
    from meshwright.spec.graph import Graph
    from meshwright.spec.placement import Placement
    from meshwright.spec.plan import Plan

ScenarioOption = Annotated[
    list[str] | None,
    typer.Option(help="What happens meanwhile: a .toml file, or a shipped scenario by name; repeat to put one on top."),
]


def load_scenarios(references: Sequence[str] | None) -> Scenario:
    """One scenario of all that were named, in their order."""
    return compose([load_scenario(reference) for reference in references or ()])


def compare_scenario(
    scenario: Scenario,
    result: Simulation,
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    contention: Contention,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plan without the scenario beside the plan with it: facts, and a sentence; nothing without a scenario."""
    from meshwright.report import describe_scenario
    from meshwright.simulator import simulate_plan

    if not scenario.effects:
        return {}, ()
    words = describe_scenario(scenario)
    before_s = simulate_plan(plan, graph, usual.cluster, cost=usual, contention=contention).step_time_s
    facts = {"name": scenario.name, "effects": words, "step_time_without_s": before_s}
    change = "the same" if result.step_time_s == before_s else _change(result.step_time_s / before_s - 1)
    name = f" {scenario.name}" if scenario.name else ""
    sentence = (
        f"Scenario{name}: {words}. A steady step takes {format_seconds(result.step_time_s)}, without the scenario "
        f"{format_seconds(before_s)}: {change}."
    )
    return facts, (sentence,)


def _change(share: float) -> str:
    return f"{'+' if share > 0 else '−'} {format_percent(abs(share))}"
