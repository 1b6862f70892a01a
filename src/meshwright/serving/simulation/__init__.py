"""The simulator of serving: requests, devices and a policy on a virtual clock.

simulate_serving  simulate a deployment for some seconds; devices that hold only some models are separate pools
goodput           the highest rates that a policy serves, and policies compared
serving_engine    the event loop
fleet_series      devices that are started and released
weights           devices that hold some of the models, and load other models on demand
"""

from meshwright.serving.simulation.goodput import IN_TIME, compare_policies, find_goodput
from meshwright.serving.simulation.simulate_serving import (
    ServedCounts,
    ServingResult,
    latency_table,
    simulate_deployment,
)

__all__ = [
    "IN_TIME",
    "ServedCounts",
    "ServingResult",
    "compare_policies",
    "find_goodput",
    "latency_table",
    "simulate_deployment",
]
