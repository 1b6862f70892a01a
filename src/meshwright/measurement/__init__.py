"""Measure ops, optimizer steps, transfers and batches of whole models on this machine, for one measurement table."""

from meshwright.measurement.clocks import CudaClock, DeviceClock, Sample
from meshwright.measurement.copy_timing import DEFAULT_SIZES, measure_transfers
from meshwright.measurement.device_rows import TableSizes as TableSizes
from meshwright.measurement.device_rows import measure_device_table
from meshwright.measurement.device_timing import (
    DeviceOp,
    InputSpec,
    make_move,
    materialised,
    measure_call,
    measure_device_ops,
    measure_device_optimizers,
    measure_issue,
    refuse_fatal,
)
from meshwright.measurement.links import measure_links, measure_links_here
from meshwright.measurement.machine_table import ALL_OPTIMIZERS, measure_machine, measure_rates
from meshwright.measurement.merge import BATCH_CONDITIONS, merge_measurements
from meshwright.measurement.op_batches import measure_batches
from meshwright.measurement.op_timing import Company, OpRun, measure_ops
from meshwright.measurement.optimizer_timing import is_out_of_memory, measure_optimizers
from meshwright.measurement.rank_processes import RankContext, run_ranks
from meshwright.measurement.segments import OpSource, Segment, build_segments, covering_layers

__all__ = [
    "ALL_OPTIMIZERS",
    "BATCH_CONDITIONS",
    "DEFAULT_SIZES",
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
