"""A grid of cases: every combination of the values of some parameters of plan and scenario, all simulated.

`parameters` describes the parameters and values. A case that cannot be simulated has an error in place of figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from meshwright.cost import CostModel
from meshwright.simulator.engine import Contention
from meshwright.simulator.many import run_places
from meshwright.simulator.plan import simulate_plan
from meshwright.simulator.scenarios.outcome import Replan, simulate_scenario
from meshwright.simulator.scenarios.parameters import MAX_CASES, Parameter, Value, change_case
from meshwright.simulator.scenarios.steps import NUM_SEEDS
from meshwright.spec import Graph, MeshwrightError, Placement, Plan, PlanError, ScenarioError
from meshwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One case per row: the values of the parameters, then the figures, or the error, of its simulation."""

    parameters: tuple[Parameter, ...]
    rows: tuple[dict[str, Any], ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures, in order; ``error`` comes last, if a case has one."""
        known = dict.fromkeys(key for row in self.rows for key in row)
        names = [name for name in known if name not in {parameter.name for parameter in self.parameters}]
        return tuple(sorted(names, key=lambda name: name == "error"))


def sweep_cases(
    parameters: Sequence[Parameter],
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    scenario: Scenario,
    *,
    run_steps: float | None = None,
    num_seeds: int = NUM_SEEDS,
    contention: Contention = "queued",
    replan: Replan | None = None,
    num_processes: int | None = None,
) -> Sweep:
    """Simulate every combination of the parameters' values, the last parameter changing fastest, on all cores.

    A case that cannot be simulated has the reason as ``error``. Raises MeshwrightError for a parameter with no usable
    value: plan and scenario do not have it, or all its values are of the wrong type.
    """
    count = int(np.prod([len(parameter.values) for parameter in parameters], dtype=object))
    if not 1 <= count <= MAX_CASES or len({parameter.name for parameter in parameters}) < len(parameters):
        raise ScenarioError(
            f"{count} cases of {', '.join(parameter.name for parameter in parameters)} were asked for; expected 1 to "
            f"{MAX_CASES}, and each parameter once."
        )
    for parameter in parameters:
        _check_values(parameter, plan, scenario)
    combinations = list(product(*(parameter.values for parameter in parameters)))
    names = [parameter.name for parameter in parameters]
    # Fill the cost model's cache of device costs once, before processes are forked.
    simulate_plan(plan, graph, usual.cluster, cost=usual, contention=contention)

    def run(place: int) -> dict[str, Any]:
        values = dict(zip(names, combinations[place], strict=True))
        try:
            changed, happens = change_case(plan, scenario, values)
            outcome = simulate_scenario(
                changed,
                graph,
                _costs_for(changed, usual),
                happens,
                run_steps=run_steps,
                num_seeds=num_seeds,
                contention=contention,
                replan=replan,
            )
        except MeshwrightError as error:
            return {**values, "error": f"{_words(values)}: {error}"}
        return {**values, **outcome.row()}

    return Sweep(parameters=tuple(parameters), rows=tuple(run_places(run, count, num_processes)))


def _check_values(parameter: Parameter, plan: Plan | Placement, scenario: Scenario) -> None:
    """Raise the first error of a parameter that has no usable value, and ScenarioError for a value given twice."""
    again = [value for place, value in enumerate(parameter.values) if value in parameter.values[:place]]
    if again:
        raise ScenarioError(f"{parameter.name}: the value {again[0]} was given more than once. Give each value once.")
    errors = list[MeshwrightError]()
    for value in parameter.values:
        values = {parameter.name: value}
        try:
            change_case(plan, scenario, values)
            return
        except PlanError:
            # A plan that is impossible with this value may be possible with another parameter's value.
            return
        except MeshwrightError as error:
            errors.append(type(error)(f"{_words(values)}: {error}"))
    raise errors[0]


def _words(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _costs_for(plan: Plan | Placement, usual: CostModel) -> CostModel:
    precision = plan.workload.precision
    return usual if precision == usual.precision else replace(usual, precision=precision)
