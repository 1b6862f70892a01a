"""Compiled units: the kernels into which inductor fuses ops, forward and backward, and their memory traffic.

    written_values      how an operator is decomposed, and the values of a unit, both passes
    partition           which of them the backward recomputes; all steps for one unit
    inductor_lowering   which of them are stored, and by which loops
    fused_kernels       which of these are one kernel
    unit_costs          seconds of the kernels

Everything but the costs follows torch 2.13 (torch/_functorch/partitioners.py, torch/_inductor/graph.py, ir.py,
scheduler.py), step by step, on values as coarse as ops need them.
"""

from meshwright.cost.fusion.fused_kernels import FusedKernel
from meshwright.cost.fusion.partition import FusedUnit, fuse_unit

__all__ = ["FusedKernel", "FusedUnit", "fuse_unit"]
