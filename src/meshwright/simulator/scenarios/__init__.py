"""Scenarios: what if devices, links and runs were other than the cluster says? Applies the effects of `spec.scenario`.

`apply_scenario`   the cost model of the machines as a scenario makes them, with which any plan is simulated
"""

from meshwright.simulator.scenarios.machines import apply_scenario, change_machines

__all__ = ["apply_scenario", "change_machines"]
