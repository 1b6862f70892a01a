"""Unequal devices: which device gets which layers and how many microbatches.

`shares`   microbatches in proportion to speed
`groups`   classes of equal devices, and the groups of them that a stage may get
`mapping`  stages to devices, exact for few classes (`stage_table` is its compiled part, `assemble` makes its problems)
`moves`    small changes of a plan, for a local search on the simulator
`method`   all of these as one search method
`virtual_workers`  HetPipe's pipelines of unequal devices, side by side in waves
`accpar`   every layer split over unequal halves of a cluster, by one of three types (`accpar_chains` has the layers)
"""

from meshwright.planner.methods.unequal.accpar import ChainLayer, Half, HalvingSplit, baselines, solve_accpar
from meshwright.planner.methods.unequal.accpar_chains import chain_layers, halve
from meshwright.planner.methods.unequal.groups import DeviceClass, count_states, find_classes, find_groups
from meshwright.planner.methods.unequal.mapping import Mapping, solve_mapping
from meshwright.planner.methods.unequal.method import unequal
from meshwright.planner.methods.unequal.shares import optimal_shares
from meshwright.planner.methods.unequal.stage_table import (
    KEEPS_ALL,
    KEEPS_ONE,
    KEEPS_SOME,
    MappingProblem,
    StageTable,
    estimate_stages,
)
from meshwright.planner.methods.unequal.virtual_workers import (
    POLICIES,
    VirtualWorker,
    VirtualWorkers,
    allocate,
    form_workers,
    plan_workers,
)

__all__ = [
    "KEEPS_ALL",
    "KEEPS_ONE",
    "KEEPS_SOME",
    "POLICIES",
    "ChainLayer",
    "DeviceClass",
    "Half",
    "HalvingSplit",
    "Mapping",
    "MappingProblem",
    "StageTable",
    "VirtualWorker",
    "VirtualWorkers",
    "allocate",
    "baselines",
    "chain_layers",
    "count_states",
    "estimate_stages",
    "find_classes",
    "find_groups",
    "form_workers",
    "halve",
    "optimal_shares",
    "plan_workers",
    "solve_accpar",
    "solve_mapping",
    "unequal",
]
