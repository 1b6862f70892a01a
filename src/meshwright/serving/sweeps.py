"""Parameter sweeps: simulate a deployment with every combination of the values of some parameters.

devices=4,8,16               a field of the deployment
models.0.slo=10..50:5 ms     a field of its first model; models.0.arrivals.rate, models.0.latency.beta, ...
policy=adaptive,symphony     several policies
scale=0.5..1.5:11            a factor on all rates
seed=0..9                    a seed of the requests
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from meshwright.serving.counted import check_counted
from meshwright.serving.expansion import expand_deployment
from meshwright.serving.policies.named import load_policy
from meshwright.serving.simulation import simulate_deployment
from meshwright.simulator.scenarios import MAX_CASES, Parameter, Sweep, Value, put_value
from meshwright.spec import Deployment, MeshwrightError, ServingError
from meshwright.spec.codec import decode, encode

# The limits of `simulate`, too.
_MOST = {"seed": 2**31, "scale": 1e6}


def sweep_deployment(
    parameters: Sequence[Parameter], deployment: Deployment, seconds: float, *, seed: int = 0, scale: float = 1.0
) -> Sweep:
    """Simulate every combination of the parameters' values; return a row for each.

    The last parameter changes fastest. The row of an invalid combination has an ``error``. Raises ServingError for too
    many combinations, for a parameter that is given twice, and if every combination is invalid.
    """
    count = 1
    for parameter in parameters:
        count *= len(parameter.values)
    names = [parameter.name for parameter in parameters]
    if not 1 <= count <= MAX_CASES or len(set(names)) < len(names):
        raise ServingError(
            f"Got {count} combinations of {', '.join(names)}; expected 1 to {MAX_CASES}, and each parameter once."
        )
    rows = []
    errors = list[MeshwrightError]()
    for combination in product(*(parameter.values for parameter in parameters)):
        values = dict(zip(names, combination, strict=True))
        try:
            changed, settings = _change(deployment, values, {"seed": seed, "scale": scale})
            result = simulate_deployment(changed, load_policy(changed.policy), seconds, **settings)
            models = expand_deployment(changed, settings["scale"]).models
            check_counted(result.num_requests, models, seconds, scale=settings["scale"])
            rows.append({**values, **result.row()})
        except MeshwrightError as error:
            errors.append(error)
            rows.append({**values, "error": str(error)})
    if len(errors) == len(rows):
        raise errors[0]
    return Sweep(parameters=tuple(parameters), rows=tuple(rows))


def _change(
    deployment: Deployment, values: Mapping[str, Value], settings: dict[str, Any]
) -> tuple[Deployment, dict[str, Any]]:
    data = encode(deployment)
    settings = dict(settings)
    for name, value in values.items():
        if name in settings:
            is_whole = isinstance(value, int) or name != "seed"
            if isinstance(value, bool | str) or not is_whole or not 0 <= value <= _MOST[name]:
                kind = "whole number" if name == "seed" else "number"
                raise ServingError(f"Got {name}={value}; expected a {kind} from 0 to {_MOST[name]:.10g}.")
            settings[name] = value
        else:
            put_value(data, name.split("."), value, name)
    return decode(Deployment, data, "deployment"), settings
