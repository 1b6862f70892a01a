"""Serving under deadlines: batching and placing requests by policies that are simulated and run from one source.

batching      the equations of batching, and what they bound
arrivals      when requests come
policies      which requests run together, where and when
simulation    a deployment under a policy, on a virtual clock
capacity      how many devices these requests need
placement     which device holds which models
query_trees   queries that ask several models, and how much time each gets
trunks        models that share their first layers
expansion     a deployment whose queries and trunks are models like others
sweeps        a deployment with some of its values changed
"""

from meshwright.serving.arrivals import draw_arrivals, mean_rate
from meshwright.serving.batching import (
    bound_rate,
    bound_scale,
    devices_for,
    largest_batch,
    throughput,
)
from meshwright.serving.capacity import Capacity, find_capacity
from meshwright.serving.expansion import expand_deployment
from meshwright.serving.placement import PLACE_METHODS, PlacedModels, bound_share, place_models
from meshwright.serving.policies import POLICY_NAMES, load_policy
from meshwright.serving.query_trees import call_rates, devices_of, split_evenly, split_time
from meshwright.serving.simulation import (
    Served,
    ServingResult,
    compare_policies,
    find_goodput,
    simulate_deployment,
)
from meshwright.serving.sweeps import sweep_deployment
from meshwright.serving.trunks import devices_shared, separate_heads, share_trunk

__all__ = [
    "PLACE_METHODS",
    "POLICY_NAMES",
    "Capacity",
    "PlacedModels",
    "Served",
    "ServingResult",
    "bound_rate",
    "bound_scale",
    "bound_share",
    "call_rates",
    "compare_policies",
    "devices_for",
    "devices_of",
    "devices_shared",
    "draw_arrivals",
    "expand_deployment",
    "find_capacity",
    "find_goodput",
    "largest_batch",
    "load_policy",
    "mean_rate",
    "place_models",
    "separate_heads",
    "share_trunk",
    "simulate_deployment",
    "split_evenly",
    "split_time",
    "sweep_deployment",
    "throughput",
]
