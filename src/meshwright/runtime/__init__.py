"""Executes Programs on torch.distributed: the same instructions that the simulator estimates, with real tensors.

opening          builds a `session` of one rank from a plan and a captured model, out of the other modules
holding          a process's part of a plan: modules, parameters, program
local_models     the model of a process: the captured model, or its share in a team (`teams`); `checkpointing` runs
                 parts of it again
rank_program     the instructions of one rank, in the order of issue
executor         issues them and holds values between stages; `bucket_sums` has the gradients to sum, `transport` the
                 works that are not finished
session          the section that runs for each batch
stage_module     forwards and backwards of one stage, also in two parts; `versions` if weights change in between
optimizer_steps  the norm of all gradients, the loss scale, states sharded over replicas, and repairs of stale
                 gradients; `stage_steps` steps stage by stage
compiling        layers that torch compiles; `compile_ahead` compiles them before the first step
fully_sharded    replicas that shard gradients and parameters; `ranges` makes modules of ranges of ops
transport        sends, receives and sums, in `stage_layouts` known to both ends
gradient_reduction  buckets of gradients
prefetch         prefetched inputs
devices          the devices of ranks: GPUs by CUDA, or processors
replica_broadcast  broadcasts of initial weights, and of the buffers of replicas
recorder         spans of all ranks on one clock
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
