"""Sharding: a graph and a `Sharding` → the local graph of one rank and the collectives between the ranks.

table       `placements.toml`: the dims by which each operator can be split, and the collectives of conversions
            (`placement_table`, `views`, `dims`)
propagate   `propagate` and `sharding_rules` choose the label along which each op is split, and so the layout of every
            tensor (`axis_facts`)
experts     `expert_ops` finds mixtures that sort choices by expert and checks counts, `convert` their exchanges
local       `convert` converts tensors to the layouts in which they are read, `local_graphs` writes the local graph,
            axis by axis
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
