"""Simulate a plan in a scenario (`simulate_scenario`), compute its price (`bill`), sweep parameters (`sweep_cases`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.simulator.engine import Contention
from meshwright.simulator.many import run_places
from meshwright.simulator.plan_simulation import simulate_plan
from meshwright.simulator.scenarios.forecast import Forecast, forecast_run, is_about_runs
from meshwright.simulator.scenarios.long_run import NUM_SEEDS, StepTimes, has_jitter
from meshwright.simulator.scenarios.machines import apply_scenario
from meshwright.simulator.scenarios.parameters import MAX_CASES, Parameter, Value, change_case
from meshwright.simulator.scenarios.policy_steps import steps_under_jitter
from meshwright.simulator.simulation import Simulation
from meshwright.spec import Cluster, Graph, MeshwrightError, Placement, Plan, PlanError, ScenarioError, suggest
from meshwright.spec.scenario import Price, Scenario

_SECONDS_PER_HOUR = 3600.0


# The last price given for a kind of device holds, and likewise for nodes; both are added. A run is paid for its whole
# time, including all losses.
def price_per_hour(
    num_devices: int, cluster: Cluster, scenario: Scenario, idle: Collection[int] = ()
) -> tuple[float, str] | None:
    """Return (price per hour, currency) of the first ``num_devices`` devices that are not ``idle``, and their nodes.

    Returns None if the scenario gives no price. Raises ScenarioError for prices in several currencies, and for a kind
    of device that the cluster does not have.
    """
    prices = scenario.effects_of(Price)
    if not prices:
        return None
    currencies = {price.currency for price in prices}
    there = islice((rank for rank in range(cluster.num_ranks) if rank not in idle), num_devices)
    used = [(cluster.device_kind(rank).usual_name, cluster.node_index(rank)) for rank in there]
    kinds = {kind.usual_name for kind in cluster.device_kinds}
    for place, price in enumerate(scenario.effects):
        if not isinstance(price, Price):
            continue
        if price.currency != prices[0].currency:
            with scenario.naming(place, "currency"):
                raise ScenarioError(
                    f"prices in {', '.join(sorted(currencies))} were given; expected one currency. Convert the prices."
                )
        if price.device and price.device not in kinds:
            with scenario.naming(place, "device"):
                raise ScenarioError(
                    f"the cluster has no devices of kind {price.device!r}{suggest(price.device, kinds)}."
                )
    devices: dict[int, float] = {}
    nodes: dict[int, float] = {}
    for price in prices:
        for rank, (kind, node) in enumerate(used):
            if price.device in ("", kind):
                (devices if price.of == "device" else nodes)[rank if price.of == "device" else node] = price.per_hour
    return sum(devices.values()) + sum(nodes.values()), prices[0].currency


def bill(
    plan: Plan | Placement,
    graph: Graph,
    cluster: Cluster,
    scenario: Scenario,
    step_s: float,
    run_s: float | None,
    num_steps: float | None,
) -> dict[str, Any]:
    """Return the prices of a step, of a million samples or tokens, and of the run, by name; {} without a price.

    ``step_s``: seconds of a step; ``run_s`` and ``num_steps``: those of a run, None without a run. With a run, a step
    costs the price of the run divided by its steps, which includes all losses.
    """
    priced = price_per_hour(plan.num_devices, cluster, scenario, plan.idle if isinstance(plan, Plan) else ())
    if priced is None:
        return {}
    per_hour, currency = priced
    if run_s is not None and num_steps:
        step_s = run_s / num_steps
    step = per_hour * step_s / _SECONDS_PER_HOUR
    samples = plan.workload.global_batch * plan.used_share
    figures: dict[str, Any] = {
        "currency": currency,
        "price_per_hour": per_hour,
        "price_per_step": step,
        "price_per_million_samples": 1e6 * step / samples,
    }
    if (tokens := graph.sequence_length) is not None:
        figures["price_per_million_tokens"] = 1e6 * step / (samples * tokens)
    if num_steps:
        figures["price_of_run"] = step * num_steps
    return figures


# Step time in seconds of the best plan for the machines of a cost model; None if no plan fits them.
Replan = Callable[[CostModel], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome:
    """The results of a plan in a scenario.

    ``simulation``: a steady step without jitter. ``steps``: steps with random times, None if the scenario has no
    jitter. ``run``: a long run, None if none is followed. ``price``: see `bill`.
    """

    simulation: Simulation
    steps: StepTimes | None
    run: Forecast | None
    price: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """Return all figures by name; names contain the units (``step_time_s``), shares are from 0 to 1."""
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
    """Simulate a plan on the machines of the cost model ``usual``, changed by the scenario's effects.

    A long run is followed if the scenario has effects on runs, or if ``run_steps``, its number of steps, is given.
    ``result`` is the simulation of the plan at the start of the run, if it is already known. ``replan`` returns the
    step time of a new plan when devices are lost. Raises ScenarioError if an effect names devices or links that the
    cluster lacks, otherwise as `simulate_plan`.
    """
    cost = apply_scenario(usual, scenario)
    result = result or simulate_plan(plan, graph, cost.cluster, cost=cost, contention=contention)
    steps, factor = None, 1.0
    if has_jitter(scenario):
        steps = steps_under_jitter(plan, graph, cost, scenario, contention=contention).time_steps(num_seeds=num_seeds)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The results of `sweep_cases`: one row per case.

    A row has the values of the parameters by name, then the figures of `ScenarioOutcome.row`, or ``error``.
    """

    parameters: tuple[Parameter, ...]
    rows: tuple[dict[str, Any], ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures of the rows, in order; ``error`` comes last if a case has an error."""
        known = dict.fromkeys(key for row in self.rows for key in row)
        names = [name for name in known if name not in {parameter.name for parameter in self.parameters}]
        return tuple(sorted(names, key=lambda name: name == "error"))


# `parameters` describes the parameters and values.
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
    """Simulate every combination of the parameters' values on all cores; the last parameter changes fastest.

    A case that cannot be simulated has the reason as ``error``. The other arguments are those of `simulate_scenario`
    and `simulate_plans`. Raises MeshwrightError for a parameter without a usable value: plan and scenario do not have
    the parameter, or all its values are of the wrong type.
    """
    count = int(np.prod([len(parameter.values) for parameter in parameters], dtype=object))
    if not 1 <= count <= MAX_CASES or len({parameter.name for parameter in parameters}) < len(parameters):
        raise ScenarioError(
            f"{count} cases of {', '.join(parameter.name for parameter in parameters)} were requested; expected 1 to "
            f"{MAX_CASES} cases, and each parameter once."
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
