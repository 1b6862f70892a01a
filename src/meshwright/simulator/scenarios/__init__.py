"""Scenarios: simulate plans on changed devices, links and runs, by applying the effects of `spec.scenario`.

`apply_scenario`      returns the cost model of the machines as a scenario changes them
`simulate_scenario`   simulates a plan in a scenario and returns all figures
`sweep_cases`         simulates a grid of values of parameters of plan and scenario
`steps_under_jitter`  simulates many steps with random times, for several seeds
"""

from meshwright.simulator.scenarios.long_run import JitteredSteps, StepTimes, has_jitter
from meshwright.simulator.scenarios.machines import apply_scenario, change_machines
from meshwright.simulator.scenarios.outcome import (
    Replan,
    ScenarioOutcome,
    Sweep,
    price_per_hour,
    simulate_scenario,
    sweep_cases,
)
from meshwright.simulator.scenarios.parameters import (
    MAX_CASES,
    Parameter,
    Value,
    change_case,
    put_value,
    read_parameter,
    read_values,
)
from meshwright.simulator.scenarios.policy_steps import PolicySteps, steps_under_jitter

__all__ = [
    "MAX_CASES",
    "JitteredSteps",
    "Parameter",
    "PolicySteps",
    "Replan",
    "ScenarioOutcome",
    "StepTimes",
    "Sweep",
    "Value",
    "apply_scenario",
    "change_case",
    "change_machines",
    "has_jitter",
    "price_per_hour",
    "put_value",
    "read_parameter",
    "read_values",
    "simulate_scenario",
    "steps_under_jitter",
    "sweep_cases",
]
