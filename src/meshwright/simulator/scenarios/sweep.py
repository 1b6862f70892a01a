"""A grid of cases: every combination of the values of some parameters of plan and scenario, all simulated.

    plan.num_microbatches=4,8,16        a field of the plan; of parts of it plan.exchange.bucket_bytes
    slow-device.factor=1..3:5           a field of the scenario's effect of that kind: five values from 1 to 3
    slow-link.2.bandwidth=1..16:5log GB/s   of the second effect of that kind, each so many times the one before
    seed=0..9                           whole numbers

A value is read as in a document, so it has its unit there. A case that cannot be simulated has its error for a figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from meshwright.cost import CostModel
from meshwright.simulator.engine import Contention
from meshwright.simulator.many import run_places
from meshwright.simulator.plan import simulate_plan
from meshwright.simulator.scenarios.outcome import Replan, simulate_scenario
from meshwright.simulator.scenarios.steps import NUM_SEEDS
from meshwright.spec import Graph, MeshwrightError, Placement, Plan, PlanError, ScenarioError, suggest
from meshwright.spec.codec import decode, encode
from meshwright.spec.scenario import Scenario

MAX_CASES = 100_000
_RANGE = re.compile(
    r"(?P<first>[+-]?[0-9.]+?)\.\.(?P<last>[0-9.]+)(?::(?P<count>[0-9]+)(?P<log>log)?)?(?:\s*(?P<unit>[A-Za-zµ].*))?"
)

Value = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A name, ``plan.`` a field, an effect's kind and field, or ``seed``, and the values that it takes."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A case in each row: the values of the parameters, then the figures of all that could be simulated."""

    parameters: tuple[Parameter, ...]
    rows: tuple[dict[str, Any], ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures, in order; ``error`` is the last where a case has one."""
        known = dict.fromkeys(key for row in self.rows for key in row)
        names = [name for name in known if name not in {parameter.name for parameter in self.parameters}]
        return tuple(sorted(names, key=lambda name: name == "error"))


def read_parameter(text: str) -> Parameter:
    """Read ``NAME=VALUES``. Raises ScenarioError for what is none."""
    name, separator, values = text.partition("=")
    if not separator or not name.strip() or not values.strip():
        raise ScenarioError(
            f"--sweep {text!r} names no values; expected PARAMETER=VALUES, as plan.num_microbatches=4,8,16 or "
            "slow-device.factor=1..3:5."
        )
    return Parameter(
        name=name.strip(), values=tuple(each for part in values.split(",") for each in _values(part.strip()))
    )


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

    Raises ScenarioError for a parameter that the scenario has not, DocumentError for one that the plan has not or for
    a value of another type than it is; each names the key.
    """
    count = int(np.prod([len(parameter.values) for parameter in parameters], dtype=object))
    if not 1 <= count <= MAX_CASES or len({parameter.name for parameter in parameters}) < len(parameters):
        raise ScenarioError(
            f"{count} cases of {', '.join(parameter.name for parameter in parameters)} were asked for; expected 1 to "
            f"{MAX_CASES}, and each parameter once."
        )
    for parameter in parameters:
        for value in parameter.values:
            # A plan may be impossible with one value and possible with others.
            with suppress(PlanError):
                change_case(plan, scenario, {parameter.name: value})
    combinations = list(product(*(parameter.values for parameter in parameters)))
    names = [parameter.name for parameter in parameters]
    # What kinds of devices cost is asked once, before processes begin.
    simulate_plan(plan, graph, usual.cluster, cost=usual, contention=contention)

    def run(place: int) -> dict[str, Any]:
        values = dict(zip(names, combinations[place], strict=True))
        try:
            changed, happens = change_case(plan, scenario, values)
            outcome = simulate_scenario(
                changed,
                graph,
                usual,
                happens,
                run_steps=run_steps,
                num_seeds=num_seeds,
                contention=contention,
                replan=replan,
            )
        except MeshwrightError as error:
            return {**values, "error": str(error)}
        return {**values, **outcome.row()}

    return Sweep(parameters=tuple(parameters), rows=tuple(run_places(run, count, num_processes)))


def change_case(
    plan: Plan | Placement, scenario: Scenario, values: Mapping[str, Value]
) -> tuple[Plan | Placement, Scenario]:
    """Plan and scenario with some parameters set. Raises as `sweep_cases`, and PlanError for an impossible plan."""
    plan_data = encode(plan)
    data: dict[str, Any] = {
        "name": scenario.name,
        "notes": scenario.notes,
        "seed": scenario.seed,
        "effects": [encode(effect) for effect in scenario.effects],
    }
    for name, value in values.items():
        where: Any = plan_data if name.startswith("plan.") else data
        path: list[Any] = name.split(".")[1:] if name.startswith("plan.") else _path_in_scenario(name, scenario)
        for key in path[:-1]:
            where = where[key] if isinstance(where, list) else where.setdefault(key, {})
        where[path[-1]] = value
    return decode(type(plan), plan_data, "plan"), decode(Scenario, data, "scenario")


def _path_in_scenario(name: str, scenario: Scenario) -> list[Any]:
    if name == "seed":
        return ["seed"]
    kind, *rest = name.split(".")
    places = [place for place, effect in enumerate(scenario.effects) if kind == effect.KIND]
    which = int(rest[0]) if len(rest) == 2 and rest[0].isdigit() else 1
    if not places:
        kinds = {str(effect.KIND) for effect in scenario.effects} | {"seed", "plan"}
        raise ScenarioError(
            f"The parameter {name!r} is of no effect of the scenario{suggest(kind, kinds)}. Give a --scenario that has "
            "such an effect, or a parameter as plan.num_microbatches."
        )
    if len(rest) not in (1, 2) or (len(rest) == 2 and not rest[0].isdigit()) or not 1 <= which <= len(places):
        raise ScenarioError(
            f"The parameter {name!r} is none; expected {kind}.FIELD, or {kind}.1.FIELD to {kind}.{len(places)}.FIELD, "
            f"for the scenario has {len(places)} of that kind."
        )
    if len(rest) == 1 and len(places) > 1:
        raise ScenarioError(
            f"The parameter {name!r} could be of {len(places)} effects; say which: {kind}.1.{rest[0]}, the first, to "
            f"{kind}.{len(places)}.{rest[0]}."
        )
    return ["effects", places[which - 1], rest[-1]]


def _values(text: str) -> list[Value]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return [_value(text)]
    try:
        first, last = float(match["first"]), float(match["last"])
        count = int(match["count"]) if match["count"] else int(last - first) + 1
        whole = match["count"] is None
        if count < 1 or count > MAX_CASES or last < first or (whole and not first.is_integer()):
            raise ValueError
        if match["log"] and first <= 0:
            raise ValueError
    except ValueError:
        raise ScenarioError(
            f"The values {text!r} are no range; expected 0..9, or 1..3:5 for five numbers, or 1..16:5log for five of "
            "which each is so many times the one before, then a unit if there is one."
        ) from None
    numbers = np.geomspace(first, last, count) if match["log"] else np.linspace(first, last, count)
    unit = f" {match['unit']}" if match["unit"] else ""
    written = [f"{number:.6g}{unit}" for number in numbers.tolist()]
    return [int(first) + k if whole and not unit else _value(each) for k, each in enumerate(written)]


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
