"""Scenarios: what if devices, links and runs were other than the cluster says? Applies the effects of `spec.scenario`.

`apply_scenario`   the cost model of the machines as a scenario makes them, with which any plan is simulated
`JitteredSteps`    many steps with random times, for several seeds
"""

from meshwright.simulator.scenarios.machines import apply_scenario, change_machines
from meshwright.simulator.scenarios.noise import has_jitter
from meshwright.simulator.scenarios.steps import JitteredSteps, StepTimes

__all__ = ["JitteredSteps", "StepTimes", "apply_scenario", "change_machines", "has_jitter"]
