"""Serving under deadlines: policies that batch and place requests, the same for the simulator and the server.

batching      equations of batching and the bounds that follow from them; latencies from a measurement table
arrivals      arrival times of requests
counted       the part of a simulation whose requests are counted, and the request rates in that time
policies      which requests form a batch, where and when it runs
simulation    a deployment under a policy, on a virtual clock
capacity      the number of devices that a deployment needs
placement     which device holds which models
expansion     a deployment with its queries (that call several models) and trunks (first layers that models share)
              turned into plain models
sweeps        a deployment with some of its values changed
server        a server that answers requests under the same policies
load          a load generator that sends requests at given moments

Public names are loaded on first use, so that server processes do not import the simulator.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "draw_arrivals": "meshwright.serving.arrivals",
    "mean_rate": "meshwright.serving.arrivals",
    "bound_scale": "meshwright.serving.batching",
    "devices_for": "meshwright.serving.batching",
    "largest_batch": "meshwright.serving.batching",
    "throughput": "meshwright.serving.batching",
    "scale_bound": "meshwright.serving.simulation.goodput",
    "Capacity": "meshwright.serving.capacity",
    "find_capacity": "meshwright.serving.capacity",
    "check_counted": "meshwright.serving.counted",
    "describe_traces": "meshwright.serving.counted",
    "expand_deployment": "meshwright.serving.expansion",
    "take_latencies": "meshwright.serving.batching",
    "PLACE_METHODS": "meshwright.serving.placement",
    "PlacedModels": "meshwright.serving.placement",
    "bound_placed": "meshwright.serving.placement",
    "bound_share": "meshwright.serving.placement",
    "place_models": "meshwright.serving.placement",
    "POLICY_NAMES": "meshwright.serving.policies.named",
    "load_policy": "meshwright.serving.policies.named",
    "call_rates": "meshwright.serving.expansion",
    "devices_of": "meshwright.serving.expansion",
    "split_evenly": "meshwright.serving.expansion",
    "split_time": "meshwright.serving.expansion",
    "Served": "meshwright.serving.simulation",
    "ServingResult": "meshwright.serving.simulation",
    "compare_policies": "meshwright.serving.simulation",
    "find_goodput": "meshwright.serving.simulation",
    "simulate_deployment": "meshwright.serving.simulation",
    "sweep_deployment": "meshwright.serving.sweeps",
    "devices_shared": "meshwright.serving.expansion",
    "share_trunk": "meshwright.serving.expansion",
}

__all__ = [*_PUBLIC]  # noqa: PLE0604  (the table is the one list of names)


def __getattr__(name: str) -> Any:
    """Load a public name from its module, once (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshwright.serving' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
