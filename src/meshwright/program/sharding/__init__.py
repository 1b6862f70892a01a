"""Sharding: a graph and a `Sharding` → the local graph of one rank and the collectives between the ranks.

table       `placements.toml`: the dims by which each operator can be split, and the collectives of conversions
            (`table`, `views`, `dims`)
propagate   `rules` choose the label along which each op is split, and so the layout of every tensor (`facts`, `absorb`)
experts     `grouped` finds mixtures that sort choices by expert, `dispatch` their exchanges, `experts` checks counts
local       `convert` converts tensors to the layouts in which they are read, `local` writes the local graph, `shard`
            does it per axis
data        `zero` gives the gathers and scatters of replicas that shard their parameters
"""

from meshwright.program.sharding.expert_ops import check_configured_experts
from meshwright.program.sharding.local_graphs import shard_graph
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
