"""Executes Programs on torch.distributed: the same instructions that the simulator estimates, with real tensors.

opening         builds a `session` of one rank from a plan and a captured model, out of the other modules
holding         a process's part of a plan: modules, parameters, program
models          the model of a process: the captured model, or its share in a team (`teams`); `recompute` runs parts
                of it again
rank_program    the instructions of one rank, in the order of issue
executor        issues them; `messages` hold values between stages, `bucket_sums` the gradients to sum, `pending` the
                works that are not finished
steps           the section that runs for each batch
stage           forwards and backwards of one stage; `split_backward` for backwards in two parts, `versions` if weights
                change in between, `repairs` against stale gradients
clipping        the norm of all gradients
compiling       layers that torch compiles; `compile_ahead` compiles them before the first step
fully_sharded   replicas that shard gradients and parameters, `sharded_optimizer` replicas that shard optimizer states;
                `ranges` makes modules of ranges of ops
transport       sends, receives and sums, in `layouts` known to both ends; sums that follow others asynchronously
exchange        buckets of gradients; `waves` of the changes of virtual workers
coming          prefetched inputs
devices         the devices of ranks: GPUs by CUDA, or processors
alike           broadcasts of initial weights, and of the buffers of replicas
stage_steps     the optimizer, stage by stage
recorder        spans of all ranks on one clock
"""

from meshwright.runtime.compiling import Compilation
from meshwright.runtime.devices import choose_device
from meshwright.runtime.executor import Executor, Output, Outputs
from meshwright.runtime.offload import check_folder, check_host, choose_folder
from meshwright.runtime.opening import open_session
from meshwright.runtime.optimizer_steps import REPAIRS, Repair, RepairKind, check_repair, with_clipping
from meshwright.runtime.overhead import measure_overhead
from meshwright.runtime.precisions import autocast_type, check_precision
from meshwright.runtime.random_state import microbatch_seed
from meshwright.runtime.rank_program import RankProgram, arrange_rank, issue_order
from meshwright.runtime.recorder import ProcessPeak, Recorder, gather_timeline, make_timeline, measure_clock_offset
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
