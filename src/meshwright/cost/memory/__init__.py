"""Memory in bytes: of a stage, and of a whole step on one device op by op."""

from meshwright.cost.memory.alike import likeness
from meshwright.cost.memory.allocator import DevicePeaks, follow_allocator
from meshwright.cost.memory.away import Away, AwayUnit, find_away
from meshwright.cost.memory.backward import Backend, library_workspaces
from meshwright.cost.memory.kept import as_kept
from meshwright.cost.memory.ledger import MemoryEvents, Peak, find_peak
from meshwright.cost.memory.lifetimes import kept_results
from meshwright.cost.memory.options import LAYERS_AT_HAND, MemoryOptions, RankMemory, weigh_rank
from meshwright.cost.memory.phases import Phase, StagePhases, count_phases
from meshwright.cost.memory.shared_units import SharedUnit, SharedUnits
from meshwright.cost.memory.sizes import weigh_tensors
from meshwright.cost.memory.stage import StageMemory, backend_of, weigh_stage
from meshwright.cost.memory.step import trace_stage, trace_step
from meshwright.cost.memory.usable import MEMORY_MARGIN, MemoryLimit

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
