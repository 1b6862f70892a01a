"""Alpa (Zheng et al., OSDI 2022): an integer program splits every op over a logical mesh.

mesh, op_groups, strategies   the choices and their costs
integer_program, intra        the intra-operator pass: the cheapest placements
express                       the placements as the sharding of a plan
alpa_method                   the inter-operator pass (stages on submeshes), and the search method
"""

from meshwright.planner.methods.alpa.express import Expressed, express
from meshwright.planner.methods.alpa.intra import Placements, amounts_of, place_ops
from meshwright.planner.methods.alpa.mesh import (
    AlphaBeta,
    AxisCosts,
    LogicalMesh,
    closed_form_mesh,
    mesh_of_cluster,
)
from meshwright.planner.methods.alpa.op_groups import AxisUse
from meshwright.planner.methods.alpa.strategies import Amounts

__all__ = [
    "AlphaBeta",
    "Amounts",
    "AxisCosts",
    "AxisUse",
    "Expressed",
    "LogicalMesh",
    "Placements",
    "amounts_of",
    "closed_form_mesh",
    "express",
    "mesh_of_cluster",
    "place_ops",
]
