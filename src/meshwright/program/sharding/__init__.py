"""Sharding: a graph and a `Sharding` → the local graph of one rank and the collectives between the ranks.

table       `placements.toml`: what can be split of each operator, what conversions exchange (`table`, `views`, `dims`)
propagate   `rules` choose along which label each op is split; so every tensor lies some way (`facts`, `absorb`)
experts     `grouped` finds mixtures that sort choices by expert, `dispatch` what travels for them, `experts` counts
local       `convert` brings tensors to lie as they are read, `local` writes the local graph, `shard` does it per axis
data        `zero` says what replicas gather and scatter that share their parameters
"""

from meshwright.program.sharding.experts import check_configured_experts
from meshwright.program.sharding.shard import shard_graph
from meshwright.program.sharding.sharded import MESH, ShardedGraph
from meshwright.program.sharding.zero import (
    GatherUnit,
    GroupCollective,
    ParameterGroup,
    find_units,
    fsdp_collectives,
    padded_bytes,
    parameter_groups,
)

__all__ = [
    "MESH",
    "GatherUnit",
    "GroupCollective",
    "ParameterGroup",
    "ShardedGraph",
    "check_configured_experts",
    "find_units",
    "fsdp_collectives",
    "padded_bytes",
    "parameter_groups",
    "shard_graph",
]
