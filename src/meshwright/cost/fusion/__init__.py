"""Costs of compiled code: the kernels into which torch's inductor fuses ops, and the bytes that they read and write.

A unit is a range of ops that torch compiles together. The modules, in order:

    written_values      decomposes each operator; lists the values of a unit's forward and backward
    partition           chooses the values that the backward recomputes; runs all steps for one unit
    inductor_lowering   chooses the values that are stored in memory, and the loops that compute them
    fused_kernels       groups the loops into kernels
    unit_costs          seconds of the kernels

All modules except `unit_costs` follow torch 2.13 step by step (torch/_functorch/partitioners.py,
torch/_inductor/graph.py, ir.py, scheduler.py), on values as coarse as the ops allow.
"""

from meshwright.cost.fusion.fused_kernels import FusedKernel
from meshwright.cost.fusion.partition import FusedUnit, fuse_unit

__all__ = ["FusedKernel", "FusedUnit", "fuse_unit"]
