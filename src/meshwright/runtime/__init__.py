"""Execute Programs on torch.distributed: the same instructions that the simulator estimates, with real tensors.

opening          builds the `session` of one rank from a plan and a captured model
holding          the part of a plan that one process runs: modules, parameters, program
local_models     the model of a process: the captured model, or its shard in a team (`teams`); `checkpointing`
                 recomputes ranges of it
rank_program     the instructions of one rank, in the order of issue
executor         issues these instructions and holds values between stages; `bucket_sums` issues the gradient sums,
                 `transport` the sends and receives
session          trains or infers batch by batch
stage_module     forwards and backwards of one stage, also with split backwards; `versions` keeps older weights
optimizer_steps  gradient clipping, loss scaling, states sharded over replicas (ZeRO 1), and repairs of stale
                 gradients; `stage_steps` runs the optimizer stage by stage
compiling        layers that torch compiles; `compile_ahead` compiles them before the first step
fully_sharded    replicas that shard gradients and parameters (ZeRO 2, 3); `ranges` makes modules of ranges of ops
transport        point-to-point transfers and collectives; `stage_layouts` gives the tensors of each transfer
gradient_reduction  buckets of gradients
prefetch         prefetched inputs
position         what a rank does, for the thread that watches it
devices          the devices of ranks: CUDA GPUs or CPUs
controlled       runs controllers on real events
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
from meshwright.runtime.position import Phase, Position, count_progress
from meshwright.runtime.precisions import autocast_type, check_precision
from meshwright.runtime.random_state import microbatch_seed
from meshwright.runtime.rank_program import RankProgram, arrange_rank, issue_order
from meshwright.runtime.recorder import ProcessPeak, Recorder, gather_timeline, make_timeline, measure_clock_offset
from meshwright.runtime.session import COMMUNICATION_TIMEOUT, Session, check_runnable, is_batched, join_group
from meshwright.runtime.stage_steps import OptimizerArgument

__all__ = [
    "COMMUNICATION_TIMEOUT",
    "REPAIRS",
    "Compilation",
    "Executor",
    "OptimizerArgument",
    "Output",
    "Outputs",
    "Phase",
    "Position",
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
    "count_progress",
    "gather_timeline",
    "is_batched",
    "issue_order",
    "join_group",
    "make_timeline",
    "measure_clock_offset",
    "measure_overhead",
    "microbatch_seed",
    "open_session",
    "with_clipping",
]
