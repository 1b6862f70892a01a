"""Predicted memory in bytes, of pipeline stages and of whole training steps, followed op by op on one device."""

from meshwright.cost.memory.allocator import DevicePeaks, follow_allocator
from meshwright.cost.memory.away import Away, AwayUnit, find_away
from meshwright.cost.memory.kept import Backend, as_kept, library_workspaces, weigh_tensors
from meshwright.cost.memory.ledger import MemoryEvents, Peak, find_peak, kept_results
from meshwright.cost.memory.memory_likeness import likeness
from meshwright.cost.memory.memory_options import (
    LAYERS_AT_HAND,
    MEMORY_MARGIN,
    MemoryLimit,
    MemoryOptions,
    RankMemory,
    weigh_rank,
)
from meshwright.cost.memory.phases import Phase, StagePhases, count_phases
from meshwright.cost.memory.shared_units import SharedUnit, SharedUnits
from meshwright.cost.memory.stage_memory import StageMemory, backend_of, trace_stage, trace_step, weigh_stage

__all__ = [
    "LAYERS_AT_HAND",
    "MEMORY_MARGIN",
    "Away",
    "AwayUnit",
    "Backend",
    "DevicePeaks",
    "MemoryEvents",
    "MemoryLimit",
    "MemoryOptions",
    "Peak",
    "Phase",
    "RankMemory",
    "SharedUnit",
    "SharedUnits",
    "StageMemory",
    "StagePhases",
    "as_kept",
    "backend_of",
    "count_phases",
    "find_away",
    "find_peak",
    "follow_allocator",
    "kept_results",
    "library_workspaces",
    "likeness",
    "trace_stage",
    "trace_step",
    "weigh_rank",
    "weigh_stage",
    "weigh_tensors",
]
