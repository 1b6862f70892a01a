"""The training API (prepare, step, save), and the job that `meshwright run` starts."""

from meshwright.training.calibrate import Calibration, calibrate_here, correct_table
from meshwright.training.check import check_losses, refuse_unchecked
from meshwright.training.device_measuring import DeviceRun, choose_device, device_table_here, measure_device_here
from meshwright.training.dry import DryRun, FakeModel, dry_run
from meshwright.training.feed import Feed, measure_batches_here
from meshwright.training.job import Job, RunResult, load_source, make_batches, make_optimizer
from meshwright.training.launch import leave, run_plan, run_rank, started_by_torchrun
from meshwright.training.policy_run import PolicyTrainer
from meshwright.training.step_measuring import measure_emulated, measure_here
from meshwright.training.text import text_batches
from meshwright.training.trainer import Trainer, prepare
from meshwright.training.worker import Outcome, judge_run, watching

__all__ = [
    "Calibration",
    "DeviceRun",
    "DryRun",
    "FakeModel",
    "Feed",
    "Job",
    "Outcome",
    "PolicyTrainer",
    "RunResult",
    "Trainer",
    "calibrate_here",
    "check_losses",
    "choose_device",
    "correct_table",
    "device_table_here",
    "dry_run",
    "judge_run",
    "leave",
    "load_source",
    "make_batches",
    "make_optimizer",
    "measure_batches_here",
    "measure_device_here",
    "measure_emulated",
    "measure_here",
    "prepare",
    "refuse_unchecked",
    "run_plan",
    "run_rank",
    "started_by_torchrun",
    "text_batches",
    "watching",
]
