"""What comes of a plan in a scenario: one row of figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.cost import CostModel
from meshwright.simulator.engine import Contention
from meshwright.simulator.plan import simulate_plan
from meshwright.simulator.scenarios.machines import apply_scenario
from meshwright.simulator.scenarios.noise import has_jitter
from meshwright.simulator.scenarios.steps import NUM_SEEDS, JitteredSteps, StepTimes
from meshwright.simulator.simulation import Simulation
from meshwright.spec import Graph, Placement, Plan
from meshwright.spec.scenario import Scenario

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A steady step without jitter, and the steps under jitter, if there is any."""

    simulation: Simulation
    steps: StepTimes | None

    def row(self) -> dict[str, Any]:
        """All figures, each with its unit in the name."""
        simulation = self.simulation
        row: dict[str, Any] = {
            "step_time_s": simulation.step_time_s,
            "samples_per_s": simulation.samples_per_s,
            "bubble_share": simulation.bubble_fraction,
            "mfu": simulation.mfu,
            "peak_memory_bytes": max(simulation.peak_memory_bytes),
        }
        if self.steps is not None:
            row |= {f"jittered_{key}": value for key, value in self.steps.rows().items()}
        return row


def simulate_scenario(
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    scenario: Scenario,
    *,
    num_seeds: int = NUM_SEEDS,
    contention: Contention = "queued",
) -> Outcome:
    """Simulate a plan on the machines of ``usual`` as the scenario makes them.

    Raises ScenarioError for what the cluster has not, else as `simulate_plan`.
    """
    cost = apply_scenario(usual, scenario)
    steps = None
    if has_jitter(scenario):
        steps = JitteredSteps(plan, graph, cost, scenario, contention=contention).time_steps(num_seeds=num_seeds)
    return Outcome(simulation=simulate_plan(plan, graph, cost.cluster, cost=cost, contention=contention), steps=steps)
