"""How many bytes: of a stage, of a whole step on one device op by op, of a transformer from its sizes alone."""

from meshwright.cost.memory.ledger import MemoryEvents, Peak, find_peak
from meshwright.cost.memory.lifetimes import recompute_layers
from meshwright.cost.memory.stage import StageMemory, weigh_stage
from meshwright.cost.memory.step import predict_step_memory, trace_step

__all__ = [
    "MemoryEvents",
    "Peak",
    "StageMemory",
    "find_peak",
    "predict_step_memory",
    "recompute_layers",
    "trace_step",
    "weigh_stage",
]
