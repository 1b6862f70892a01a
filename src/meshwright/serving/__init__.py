"""Serving under deadlines: batching and placing requests by policies that are simulated and run from one source.

batching      the equations of batching, and what they bound
arrivals      when requests come
counted       which time of a simulation counts, and what comes in it
bounds        by what the rates of a deployment can be multiplied
policies      which requests run together, where and when
simulation    a deployment under a policy, on a virtual clock
capacity      how many devices these requests need
placement     which device holds which models
query_trees   queries that ask several models, and how much time each gets
trunks        models that share their first layers
expansion     a deployment whose queries and trunks are models like others
measured      latencies from a measurement table
datatypes     values of requests, as numpy has them
sweeps        a deployment with some of its values changed
server        answers to requests as they come, by the same policies
load          requests to a server at their moments

What stands in the table is loaded on first use: processes of a server need none of the simulator.
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
    "scale_bound": "meshwright.serving.bounds",
    "Capacity": "meshwright.serving.capacity",
    "find_capacity": "meshwright.serving.capacity",
    "check_counted": "meshwright.serving.counted",
    "describe_traces": "meshwright.serving.counted",
    "expand_deployment": "meshwright.serving.expansion",
    "take_latencies": "meshwright.serving.measured",
    "PLACE_METHODS": "meshwright.serving.placement",
    "PlacedModels": "meshwright.serving.placement",
    "bound_placed": "meshwright.serving.placement",
    "bound_share": "meshwright.serving.placement",
    "place_models": "meshwright.serving.placement",
    "POLICY_NAMES": "meshwright.serving.policies.named",
    "load_policy": "meshwright.serving.policies.named",
    "call_rates": "meshwright.serving.query_trees",
    "devices_of": "meshwright.serving.query_trees",
    "split_evenly": "meshwright.serving.query_trees",
    "split_time": "meshwright.serving.query_trees",
    "Served": "meshwright.serving.simulation",
    "ServingResult": "meshwright.serving.simulation",
    "compare_policies": "meshwright.serving.simulation",
    "find_goodput": "meshwright.serving.simulation",
    "simulate_deployment": "meshwright.serving.simulation",
    "sweep_deployment": "meshwright.serving.sweeps",
    "devices_shared": "meshwright.serving.trunks",
    "share_trunk": "meshwright.serving.trunks",
}

__all__ = [*_PUBLIC]  # noqa: PLE0604  (the table is the one list of names)


def __getattr__(name: str) -> Any:
    """Load a public name from its module, once (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshwright.serving' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
