"""Unequal devices: which device gets which layers and how many microbatches.

`shares`   microbatches in proportion to speed
`groups`   classes of equal devices, and the groups of them that a stage may get
`mapping`  stages to devices, exact for few classes (`stage_table` is its compiled part, `assemble` makes its problems)
`moves`    small changes of a plan, for a local search on the simulator
`method`   all of these as one search method
`virtual_workers`  HetPipe's pipelines of unequal devices, side by side in waves
"""

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
from meshwright.planner.methods.unequal.shares import optimal_shares
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
