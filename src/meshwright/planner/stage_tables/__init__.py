"""Stage tables: seconds and bytes of every possible stage of a graph, found once for all cuts.

`find_structure`   which ops, parameters and values a stage i:j holds, as rectangles
`make_tables`      their seconds on every kind of device, and their bytes, at one microbatch size
"""

from meshwright.planner.stage_tables.bytes import StageBytesTable, as_kept_least, sent_to_several, weigh_alone
from meshwright.planner.stage_tables.seconds import StageSecondsTable
from meshwright.planner.stage_tables.structure import Structure, find_structure
from meshwright.planner.stage_tables.tables import Tables, make_tables, settle_stage

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
