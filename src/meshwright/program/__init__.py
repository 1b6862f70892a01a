"""Plan → Program: schedules, transfers and gradient exchange, written as data for the simulator and the runtime."""

from meshwright.program.buckets import Bucket, gradient_buckets
from meshwright.program.build import build_program
from meshwright.program.builder import ProgramBuilder
from meshwright.program.check import check_program
from meshwright.program.orders import Order, compute_orders, count_in_flight, max_in_flight
from meshwright.program.own_schedules import OwnSchedule, find_schedule, name_schedule, with_schedule
from meshwright.program.placed import PLACED, build_placed_program, trained_stages
from meshwright.program.progress import picture_schedule
from meshwright.program.schedules import SCHEDULE_LAYOUTS, SCHEDULES, local_microbatches, num_active, stays_on_rank
from meshwright.spec.instructions import Backward, BackwardInput, BackwardWeight, Forward

__all__ = [
    "PLACED",
    "SCHEDULES",
    "SCHEDULE_LAYOUTS",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Bucket",
    "Forward",
    "Order",
    "OwnSchedule",
    "ProgramBuilder",
    "build_placed_program",
    "build_program",
    "check_program",
    "compute_orders",
    "count_in_flight",
    "find_schedule",
    "gradient_buckets",
    "local_microbatches",
    "max_in_flight",
    "name_schedule",
    "num_active",
    "picture_schedule",
    "stays_on_rank",
    "trained_stages",
    "with_schedule",
]
