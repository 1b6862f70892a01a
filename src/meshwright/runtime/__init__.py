"""Runs Programs on torch.distributed: the same instructions that the simulator estimates, with real tensors.

opening         from a plan and a captured model to a rank that is ready, a `session`; it puts the others together
holding         what a process has of a plan: modules, parameters, program
models          what a process computes: the captured model, or its share in a team (`teams`); `recompute` runs parts
                of it again
rank_program    what one rank issues, and when
executor        issues it; `messages` hold what crosses between stages, `bucket_sums` what is summed, `pending` what
                is under way
steps           which section of it runs, batch by batch
stage           forwards and backwards of one stage; `split_backward` where they come in two parts, `versions` where
                weights change meanwhile, `repairs` what may be done about that
clipping        the norm of all gradients
compiling       layers that torch compiles, `compile_ahead` before the first step
fully_sharded   replicas that share out gradients and parameters, `sharded_optimizer` those that share out its states;
                `ranges` makes modules of ranges of ops
transport       sends, receives and sums, in `layouts` that both ends know; sums that follow others beside the
                computations
exchange        buckets of gradients; `waves` of what virtual workers changed
coming          inputs that are still being made
devices         what ranks compute on: GPUs by CUDA, or processors
alike           what all processes begin with, and the buffers of replicas
stage_steps     the optimizer, stage by stage
recorder        spans of all ranks on one clock
"""

from meshwright.runtime.clipping import with_clipping
from meshwright.runtime.compiling import Compilation
from meshwright.runtime.devices import choose_device
from meshwright.runtime.executor import Executor, Output, Outputs
from meshwright.runtime.offload import check_folder, check_host, choose_folder
from meshwright.runtime.opening import open_session
from meshwright.runtime.overhead import measure_overhead
from meshwright.runtime.precisions import autocast_type, check_precision
from meshwright.runtime.random_state import microbatch_seed
from meshwright.runtime.rank_program import RankProgram, arrange_rank, issue_order
from meshwright.runtime.recorder import ProcessPeak, Recorder, gather_timeline, make_timeline, measure_clock_offset
from meshwright.runtime.repairs import REPAIRS, Repair, RepairKind, check_repair
from meshwright.runtime.session import Session, check_runnable, join_group
from meshwright.runtime.stage_steps import OptimizerArgument

__all__ = [
    "REPAIRS",
    "Compilation",
    "Executor",
    "OptimizerArgument",
    "Output",
    "Outputs",
    "ProcessPeak",
    "RankProgram",
    "Recorder",
    "Repair",
    "RepairKind",
    "Session",
    "arrange_rank",
    "autocast_type",
    "check_folder",
    "check_host",
    "check_precision",
    "check_repair",
    "check_runnable",
    "choose_device",
    "choose_folder",
    "gather_timeline",
    "issue_order",
    "join_group",
    "make_timeline",
    "measure_clock_offset",
    "measure_overhead",
    "microbatch_seed",
    "open_session",
    "with_clipping",
]
