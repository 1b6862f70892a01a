"""Stage tables: seconds and bytes of every possible stage of a graph, computed once for all cuts.

Stage i:j has the layers i to j - 1. `find_structure` finds its ops, parameters and values, as rectangles. `make_tables`
computes its seconds on every device kind, and its bytes, at one microbatch size.
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
