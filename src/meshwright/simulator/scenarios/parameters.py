"""The parameters of a sweep: their names and values, and how to set them in plan and scenario.

    plan.num_microbatches=4,8,16        a field of the plan; nested fields: plan.exchange.bucket_bytes,
                                        plan.stages.0.stop
    slow-device.factor=1..3:5           a field of the scenario's slow-device effect: five values from 1 to 3
    slow-link.2.bandwidth=1..16:5log GB/s   a field of the second slow-link effect: five values at constant ratio
    seed=0..9                           whole numbers

Values have the same form and units as in a plan or scenario document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.spec import Placement, Plan, ScenarioError, suggest
from meshwright.spec.codec import decode, encode
from meshwright.spec.scenario import Scenario

MAX_CASES = 100_000
_RANGE = re.compile(
    r"(?P<first>[+-]?[0-9.]+?)\.\.(?P<last>[0-9.]+)(?::(?P<count>[0-9]+)(?P<log>log)?)?(?:\s*(?P<unit>[A-Za-zµ].*))?"
)
_NUMBER = re.compile("[0-9]{1,6}")
# Fields that are read before a sweep begins, so that another value in the document would change nothing.
_FIXED = {
    "cluster": "All cases are about one cluster: give --cluster, one sweep for each, or let a scenario change it",
    "model": "All cases are about the plan's graph: plan the other model, and sweep that plan",
    "model_sizes": "All cases are about the plan's graph: plan with other sizes, and sweep that plan",
    "rewritten": "All cases are about the plan's graph: plan with or without --rewrite, and sweep that plan",
    "graph_hash": "All cases are about the plan's graph: plan the other graph, and sweep that plan",
    "schedule_hash": "It belongs to the file of the schedule: sweep plan.schedule",
}

Value = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a sweep: its name (``plan.FIELD``, ``EFFECT.FIELD`` or ``seed``) and its values, in order."""

    name: str
    values: tuple[Value, ...]


def read_parameter(text: str) -> Parameter:
    """Read a parameter from text, ``NAME=VALUES``. Raises ScenarioError for other text."""
    name, separator, values = text.partition("=")
    if not separator or not name.strip() or not values.strip():
        raise ScenarioError(
            f"--sweep {text!r} has no name or no values; expected PARAMETER=VALUES, such as "
            "plan.num_microbatches=4,8,16 or slow-device.factor=1..3:5."
        )
    return Parameter(name=name.strip(), values=read_values(values))


def read_values(text: str) -> tuple[Value, ...]:
    """Read values and ranges, separated by commas: ``1,2,8..16``. Raises ScenarioError for an invalid range."""
    return tuple(each for part in text.split(",") for each in _values(part.strip()))


def change_case(
    plan: Plan | Placement, scenario: Scenario, values: Mapping[str, Value]
) -> tuple[Plan | Placement, Scenario]:
    """Return plan and scenario with the parameters in ``values`` set, by name.

    Raises ScenarioError for a parameter that the scenario does not have or that cannot be swept, DocumentError for a
    field that the plan does not have or for a value of the wrong type, and PlanError for an impossible plan.
    """
    plan_data = encode(plan)
    data: dict[str, Any] = {
        "name": scenario.name,
        "notes": scenario.notes,
        "seed": scenario.seed,
        "effects": [encode(effect) for effect in scenario.effects],
    }
    for name, value in values.items():
        if name.startswith("plan."):
            put_value(plan_data, _path_in_plan(name), value, name)
        else:
            put_value(data, _path_in_scenario(name, scenario), value, name)
    return decode(type(plan), plan_data, "plan"), decode(Scenario, data, "scenario").read_from(scenario.origins)


def put_value(where: Any, path: Sequence[str | int], value: Value, name: str) -> None:
    """Set the value at the end of ``path`` in nested tables and lists; ``where`` is changed.

    ``name`` is the parameter's name, for messages. Raises ScenarioError if the path does not exist.
    """
    for key in path[:-1]:
        where = where[_place(where, key, name)] if isinstance(where, list) else _table(where, name).setdefault(key, {})
    if isinstance(where, list):
        where[_place(where, path[-1], name)] = value
    else:
        _table(where, name)[path[-1]] = value


def _table(where: Any, name: str) -> dict[str | int, Any]:
    if not isinstance(where, dict):
        raise ScenarioError(
            f"The parameter {name!r} does not exist: {where!r} has no fields. Omit the last part of the name."
        )
    return where


def _place(where: Sequence[Any], key: str | int, name: str) -> int:
    if isinstance(key, int):
        return key
    if not _NUMBER.fullmatch(key) or int(key) >= len(where):
        raise ScenarioError(
            f"The parameter {name!r} does not exist: the name has {key!r} where a number from 0 to {len(where) - 1} is "
            "expected, the index of an item of a list."
        )
    return int(key)


def _path_in_plan(name: str) -> list[str]:
    path = name.split(".")[1:]
    if path[0] in _FIXED:
        raise ScenarioError(f"The parameter {name!r} cannot be swept. {_FIXED[path[0]]}.")
    return path


def _path_in_scenario(name: str, scenario: Scenario) -> list[str | int]:
    if name == "seed":
        return ["seed"]
    if name == "plan":
        raise ScenarioError(
            "The parameter 'plan' is a whole document; expected plan.FIELD, such as plan.num_microbatches."
        )
    kind, *rest = name.split(".")
    places = [place for place, effect in enumerate(scenario.effects) if kind == effect.KIND]
    is_numbered = len(rest) == 2 and _NUMBER.fullmatch(rest[0]) is not None
    which = int(rest[0]) if is_numbered else 1
    if not places:
        kinds = {str(effect.KIND) for effect in scenario.effects} | {"seed", "plan"}
        raise ScenarioError(
            f"The parameter {name!r} names no effect of the scenario{suggest(kind, kinds)}. Give a --scenario that has "
            "such an effect, or a parameter such as plan.num_microbatches."
        )
    if not (len(rest) == 1 or is_numbered) or not 1 <= which <= len(places):
        raise ScenarioError(
            f"The parameter {name!r} does not exist; expected {kind}.FIELD, or {kind}.1.FIELD to "
            f"{kind}.{len(places)}.FIELD, because the scenario has {len(places)} effects of that kind."
        )
    if len(rest) == 1 and len(places) > 1:
        raise ScenarioError(
            f"The parameter {name!r} is ambiguous: the scenario has {len(places)} such effects. Give their number: "
            f"{kind}.1.{rest[0]} to {kind}.{len(places)}.{rest[0]}."
        )
    return ["effects", places[which - 1], rest[-1]]


def _values(text: str) -> list[Value]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return [_value(text)]
    try:
        first, last = float(match["first"]), float(match["last"])
        whole = match["count"] is None
        if not first <= last < math.inf or (whole and not (first.is_integer() and last.is_integer())):
            raise ValueError
        count = int(last - first) + 1 if whole else int(match["count"])
        if count < 1 or count > MAX_CASES or (match["log"] and first <= 0):
            raise ValueError
    except (ValueError, OverflowError):
        raise ScenarioError(
            f"The values {text!r} are not a range; expected 0..9 for whole numbers, or 1..3:5 for five numbers, or "
            "1..16:5log for five numbers at constant ratio, then a unit if there is one."
        ) from None
    unit = f" {match['unit']}" if match["unit"] else ""
    if whole:
        return [f"{int(first) + k}{unit}" if unit else int(first) + k for k in range(count)]
    numbers = np.geomspace(first, last, count) if match["log"] else np.linspace(first, last, count)
    return [_value(f"{number:.6g}{unit}") for number in numbers.tolist()]


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        number = float(text)
        return number if math.isfinite(number) else text
    return text
