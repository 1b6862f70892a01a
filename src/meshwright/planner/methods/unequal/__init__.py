"""Plans for unequal devices: which device gets which layers and how many microbatches.

`batch_shares`     divide microbatches in proportion to speed
`mapping`          assign stages to groups of devices; exact for few classes of equal devices
`unequal_method`   improve plans by small changes on the simulator; the search method `unequal`
`virtual_workers`  HetPipe: several pipelines of unequal devices that train in waves
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
