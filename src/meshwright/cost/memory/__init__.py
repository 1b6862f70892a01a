"""How many bytes: of a stage, of a whole step on one device op by op, of a transformer from its sizes alone."""

from meshwright.cost.memory.alike import likeness
from meshwright.cost.memory.allocator import DevicePeaks, follow_allocator
from meshwright.cost.memory.backward import Backend
from meshwright.cost.memory.frameworks import DevicePeak, predict_device_peak
from meshwright.cost.memory.ledger import MemoryEvents, Peak, find_peak
from meshwright.cost.memory.options import LAYERS_AT_HAND, MemoryOptions, RankMemory, weigh_rank
from meshwright.cost.memory.phases import FIRST, LAST, Phase, StagePhases, count_phases
from meshwright.cost.memory.stage import StageMemory, backend_of, weigh_stage
from meshwright.cost.memory.step import trace_stage, trace_step
from meshwright.cost.memory.transformer import saved_bytes

__all__ = [
    "FIRST",
    "LAST",
    "LAYERS_AT_HAND",
    "Backend",
    "DevicePeak",
    "DevicePeaks",
    "MemoryEvents",
    "MemoryOptions",
    "Peak",
    "Phase",
    "RankMemory",
    "StageMemory",
    "StagePhases",
    "backend_of",
    "count_phases",
    "find_peak",
    "follow_allocator",
    "likeness",
    "predict_device_peak",
    "saved_bytes",
    "trace_stage",
    "trace_step",
    "weigh_rank",
    "weigh_stage",
]
