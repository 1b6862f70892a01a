"""Turn a plan into a program: schedules, transfers and gradient reduction as data for the simulator and the runtime.

sharding    the local graph of one rank where ops are split over several ranks, and their collectives; `plan_lowering`
            turns plans that split ops or recompute into plans that do neither
orders      the computations of each rank, in order: `schedules` by name, `own_schedules` from a user's function,
            `order_files` from a file in torch's format, `order_search` by a search
program     `build_program` adds transfers (`stage_transfers`), inputs, gradient reduction and updates
            (`gradient_exchange`, of `buckets`, in the order of `part_order`; `host_offload` on the host).
            `endless_program` builds programs of asynchronous schedules, `placed_program` those of placements,
            `pipeline_folding` the program of one among many identical replicas
at run time `controllers` decide which instructions to add while a program runs, within the rules of `issuing`;
            `decided` records their decisions as a program
afterwards  `repeat_body` unrolls a program, `picture_schedule` draws its schedule
"""

from meshwright.program.buckets import Bucket, cut_pieces, exchange_of, gradient_buckets, num_bucket_copies
from meshwright.program.build import Repeated, build_folded_program, build_program, repeat_body
from meshwright.program.builder import ProgramBuilder
from meshwright.program.decided import decided_program
from meshwright.program.host_offload import (
    PIECES_AT_HAND,
    HostNeeds,
    HostPiece,
    count_host_needs,
    host_pieces,
    stage_away,
)
from meshwright.program.order_bounds import Order
from meshwright.program.order_files import OrderFile, WrittenOrders, write_orders
from meshwright.program.order_search import FoundOrders, StageTimes, find_orders
from meshwright.program.orders import compute_orders, count_in_flight, max_in_flight
from meshwright.program.own_schedules import OwnSchedule, find_schedule, name_schedule, with_schedule
from meshwright.program.part_order import ReadyPart, order_parts
from meshwright.program.pipeline_folding import Fold, folded_buckets
from meshwright.program.placed_program import PLACED, build_placed_program, trained_stages
from meshwright.program.plan_lowering import (
    STAYS_EAGER,
    graph_of_program,
    lower_graph,
    lower_plan,
    own_workload,
    unlower_plan,
)
from meshwright.program.program_check import picture_schedule
from meshwright.program.schedules import (
    SCHEDULES,
    local_microbatches,
    minibatches_per_update,
    num_active,
    num_filling_steps,
    stays_on_rank,
)
from meshwright.program.sharding import (
    GroupCollective,
    ParameterGroup,
    ShardedGraph,
    check_configured_experts,
    fsdp_collectives,
    padded_bytes,
    parameter_groups,
    shard_graph,
)
from meshwright.spec import Backward, BackwardInput, BackwardWeight, Forward

__all__ = [
    "PIECES_AT_HAND",
    "PLACED",
    "SCHEDULES",
    "STAYS_EAGER",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Bucket",
    "Fold",
    "Forward",
    "FoundOrders",
    "GroupCollective",
    "HostNeeds",
    "HostPiece",
    "Order",
    "OrderFile",
    "OwnSchedule",
    "ParameterGroup",
    "ProgramBuilder",
    "ReadyPart",
    "Repeated",
    "ShardedGraph",
    "StageTimes",
    "WrittenOrders",
    "build_folded_program",
    "build_placed_program",
    "build_program",
    "check_configured_experts",
    "compute_orders",
    "count_host_needs",
    "count_in_flight",
    "cut_pieces",
    "decided_program",
    "exchange_of",
    "find_orders",
    "find_schedule",
    "folded_buckets",
    "fsdp_collectives",
    "gradient_buckets",
    "graph_of_program",
    "host_pieces",
    "local_microbatches",
    "lower_graph",
    "lower_plan",
    "max_in_flight",
    "minibatches_per_update",
    "name_schedule",
    "num_active",
    "num_bucket_copies",
    "num_filling_steps",
    "order_parts",
    "own_workload",
    "padded_bytes",
    "parameter_groups",
    "picture_schedule",
    "repeat_body",
    "shard_graph",
    "stage_away",
    "stays_on_rank",
    "trained_stages",
    "unlower_plan",
    "with_schedule",
    "write_orders",
]
