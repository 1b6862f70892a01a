"""Costs of collectives: from measurements of this or other clusters, or from the datasheet figures of the links."""

from meshwright.cost.collectives.algorithms import COLLECTIVE_OPS, CollectiveOp, Topology, load_topology
from meshwright.cost.collectives.collective_groups import CollectiveGroup, group_in_mesh, place_group
from meshwright.cost.collectives.fitted import CollectiveModel
from meshwright.cost.collectives.fitting import fit_collectives

__all__ = [
    "COLLECTIVE_OPS",
    "CollectiveGroup",
    "CollectiveModel",
    "CollectiveOp",
    "Topology",
    "fit_collectives",
    "group_in_mesh",
    "load_topology",
    "place_group",
]
