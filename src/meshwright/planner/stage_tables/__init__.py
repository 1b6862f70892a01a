"""Stage tables: seconds and bytes of every possible stage of a graph, computed once for all cuts.

`find_structure` finds the ops, parameters and values of a stage i:j, as rectangles. `make_tables` gives their seconds
on every device kind, and their bytes, at one microbatch size.
"""

from meshwright.planner.stage_tables.stage_tables import (
    StageBytesTable,
    StageSecondsTable,
    Tables,
    as_kept_least,
    make_tables,
    sent_to_several,
    settle_stage,
    weigh_alone,
)
from meshwright.planner.stage_tables.structure import Structure, find_structure

__all__ = [
    "StageBytesTable",
    "StageSecondsTable",
    "Structure",
    "Tables",
    "as_kept_least",
    "find_structure",
    "make_tables",
    "sent_to_several",
    "settle_stage",
    "weigh_alone",
]
