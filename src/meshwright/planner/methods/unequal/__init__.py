"""Unequal devices: which device gets which layers and how many microbatches.

`batch_shares`     microbatches in proportion to speed
`mapping`          classes of equal devices, the groups of them for a stage, and stages to groups: exact for few classes
`unequal_method`   small changes of a plan for a local search on the simulator, and all of these as one search method
`virtual_workers`  HetPipe's pipelines of unequal devices, side by side in waves
"""

from meshwright.planner.methods.unequal.batch_shares import optimal_shares
from meshwright.planner.methods.unequal.mapping import (
    KEEPS_ALL,
    KEEPS_ONE,
    KEEPS_SOME,
    DeviceClass,
    Mapping,
    MappingProblem,
    StageTable,
    count_states,
    estimate_stages,
    find_classes,
    find_groups,
    solve_mapping,
)
from meshwright.planner.methods.unequal.unequal_method import unequal
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
    "DeviceClass",
    "Mapping",
    "MappingProblem",
    "StageTable",
    "VirtualWorker",
    "VirtualWorkers",
    "allocate",
    "count_states",
    "estimate_stages",
    "find_classes",
    "find_groups",
    "form_workers",
    "optimal_shares",
    "plan_workers",
    "solve_mapping",
    "unequal",
]
