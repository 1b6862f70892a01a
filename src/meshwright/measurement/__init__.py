"""Times ops, optimizer steps, transfers and batches of whole models on this machine, into one measurement table."""

from meshwright.measurement.allocation import is_out_of_memory
from meshwright.measurement.batches import measure_batches
from meshwright.measurement.device_clock import CudaClock, DeviceClock, Sample
from meshwright.measurement.device_issue import measure_call, measure_issue
from meshwright.measurement.device_ops import (
    DeviceOp,
    InputSpec,
    make_move,
    materialised,
    measure_device_ops,
    refuse_fatal,
)
from meshwright.measurement.device_optimizers import measure_device_optimizers
from meshwright.measurement.device_table import TableSizes as TableSizes
from meshwright.measurement.device_table import measure_device_table
from meshwright.measurement.links import measure_links, measure_links_here
from meshwright.measurement.machine import ALL_OPTIMIZERS, measure_machine
from meshwright.measurement.merge import BATCH_CONDITIONS, merge_measurements
from meshwright.measurement.ops import Company, OpRun, measure_ops
from meshwright.measurement.optimizers import measure_optimizers
from meshwright.measurement.processes import RankContext, run_ranks
from meshwright.measurement.rates import measure_rates
from meshwright.measurement.segments import OpSource, Segment, build_segments, covering_layers
from meshwright.measurement.transfers import measure_transfers

__all__ = [
    "ALL_OPTIMIZERS",
    "BATCH_CONDITIONS",
    "Company",
    "CudaClock",
    "DeviceClock",
    "DeviceOp",
    "InputSpec",
    "OpRun",
    "OpSource",
    "RankContext",
    "Sample",
    "Segment",
    "TableSizes",
    "build_segments",
    "covering_layers",
    "is_out_of_memory",
    "make_move",
    "materialised",
    "measure_batches",
    "measure_call",
    "measure_device_ops",
    "measure_device_optimizers",
    "measure_device_table",
    "measure_issue",
    "measure_links",
    "measure_links_here",
    "measure_machine",
    "measure_ops",
    "measure_optimizers",
    "measure_rates",
    "measure_transfers",
    "merge_measurements",
    "refuse_fatal",
    "run_ranks",
]
