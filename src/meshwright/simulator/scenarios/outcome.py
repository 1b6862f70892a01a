"""The outcome of a plan in a scenario: one row of figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.simulator.engine import Contention
from meshwright.simulator.plan import simulate_plan
from meshwright.simulator.scenarios.bill import bill
from meshwright.simulator.scenarios.forecast import Forecast, forecast_run, is_about_runs
from meshwright.simulator.scenarios.machines import apply_scenario
from meshwright.simulator.scenarios.noise import has_jitter
from meshwright.simulator.scenarios.steps import NUM_SEEDS, JitteredSteps, StepTimes
from meshwright.simulator.simulation import Simulation
from meshwright.spec import Graph, Placement, Plan
from meshwright.spec.scenario import Scenario

# Step time in seconds of the best plan for the machines of a cost model; None if no plan fits them.
Replan = Callable[[CostModel], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome:
    """A steady step without jitter; if the scenario has them, steps under jitter, a long run and its price."""

    simulation: Simulation
    steps: StepTimes | None
    run: Forecast | None
    price: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """Return all figures; each name has its unit."""
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
        if self.run is not None:
            row |= self.run.row()
        return row | self.price


def simulate_scenario(
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    scenario: Scenario,
    *,
    result: Simulation | None = None,
    run_steps: float | None = None,
    num_seeds: int = NUM_SEEDS,
    contention: Contention = "queued",
    replan: Replan | None = None,
) -> ScenarioOutcome:
    """Simulate a plan on the machines of ``usual`` with the scenario's effects.

    A run is followed if the scenario has effects on runs, or if ``run_steps`` is given. ``result`` is
    the simulation of the plan at the start of the run, if it is known already; ``replan`` makes a new plan when devices
    are lost. Raises ScenarioError if an effect names parts that the cluster lacks, else as `simulate_plan`.
    """
    cost = apply_scenario(usual, scenario)
    result = result or simulate_plan(plan, graph, cost.cluster, cost=cost, contention=contention)
    steps, factor = None, 1.0
    if has_jitter(scenario):
        steps = JitteredSteps(plan, graph, cost, scenario, contention=contention).time_steps(num_seeds=num_seeds)
        factor = steps.rows()["mean_s"] / result.step_time_s
    run = None
    if is_about_runs(scenario) or run_steps is not None:

        def step_at(moment_s: float) -> float:
            then = apply_scenario(usual, scenario, moment_s)
            if then.cluster == cost.cluster:
                return factor * result.step_time_s
            return factor * simulate_plan(plan, graph, then.cluster, cost=then, contention=contention).step_time_s

        def replan_at(moment_s: float, lost: tuple[int, ...]) -> float | None:
            then = apply_scenario(usual, scenario, moment_s)
            if replan is None or len(lost) == then.cluster.num_ranks:
                return None
            step_s = replan(without_devices(then, lost))
            return None if step_s is None else factor * step_s

        run = forecast_run(
            plan,
            graph,
            usual,
            scenario,
            step_at,
            num_steps=run_steps,
            num_seeds=num_seeds,
            replan_at=None if replan is None else replan_at,
        )
    price = bill(
        plan,
        graph,
        cost.cluster,
        scenario,
        factor * result.step_time_s,
        run.wall_s if run else None,
        run.num_steps if run else None,
    )
    return ScenarioOutcome(simulation=result, steps=steps, run=run, price=price)
