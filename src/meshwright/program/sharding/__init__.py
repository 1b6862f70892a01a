"""Shard a graph: from a graph and a `Sharding`, make the local graph of one rank and the collectives between ranks.

table       `placements.toml` lists the dims along which each operator can be split, and the collectives that convert
            tensors between layouts (`placement_table`, `views`, `dims`)
propagate   `propagate` and `sharding_rules` choose the labelled dim along which each op is split, and so the layout of
            every tensor; `axis_facts` holds the facts of the graph
experts     `expert_ops` finds mixtures of experts that sort tokens' choices by expert and checks the number of experts,
            `convert` adds their all-to-alls
local       `convert` converts tensors to the layouts in which ops read them, `local_graphs` writes the local graph, one
            mesh axis after the other
data        `zero` lists the gathers and scatters of replicas that shard their parameters
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
