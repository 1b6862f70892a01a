"""Build the program of a placement: the computations of every rank, and one send and receive per tensor and rank.

A rank runs the forwards of its stages, microbatch by microbatch, in the order of the placement. In training it then
runs the backwards in the opposite order, last microbatch first, and one optimizer step over all of its parameters.
Gradients of parameters that several ranks compute with are summed as soon as they are ready (`buckets`). The orders of
all ranks follow one global order in which every value is computed before it is read (`spec.placement`), and sums have
one order on all ranks, so ranks cannot deadlock. Transfers are those of pipelines (`stage_transfers`).
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np

from meshwright.program.buckets import gradient_buckets
from meshwright.program.builder import ProgramBuilder
from meshwright.program.schedules import OrderColumns
from meshwright.program.schedules.seats import join_ranks, make_columns
from meshwright.program.stage_transfers import (
    Computations,
    append_orders,
    append_transfers,
    find_crossings,
    find_last_backwards,
)
from meshwright.spec import (
    AllReduce,
    Graph,
    Opcode,
    OptimizerStep,
    Placement,
    Program,
    StageSlice,
    content_hash,
    slice_placement,
)

# The name of the schedule in programs of placements.
PLACED = "placed"


@lru_cache(maxsize=16)
def build_placed_program(placement: Placement, graph: Graph) -> Program:
    """Return the program of a placement. Raises PlanError if the placement does not match the graph."""
    stages = slice_placement(graph, placement)
    orders = join_ranks(_order(placement, stages, rank) for rank in range(placement.num_ranks))
    builder = ProgramBuilder(placement.num_ranks)
    computations = append_orders(builder, placement, orders)
    append_transfers(builder, computations, find_crossings(placement, graph, stages))
    sums = _append_sums(builder, computations, placement, graph)
    for rank in range(placement.num_ranks):
        trained = trained_stages(placement, graph, rank)
        if trained:
            builder.append(rank, "compute", OptimizerStep(stage=trained[0]), waits=sums[rank])
    return builder.build(schedule=PLACED, plan_hash=content_hash(placement))


def trained_stages(placement: Placement, graph: Graph, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank that have parameters to train; () for inference.

    A rank's one optimizer step has the number of the first of these stages.
    """
    stages = slice_placement(graph, placement)
    if graph.mode != "training":
        return ()
    return tuple(
        index
        for index in placement.stages_of(rank)
        if any(graph.tensors[item].requires_grad for item in stages[index].parameters)
    )


def _append_sums(
    builder: ProgramBuilder, computations: Computations, placement: Placement, graph: Graph
) -> dict[int, list[int]]:
    """Sum what several ranks hold, in the last backward that adds to it; the handles of the sums by rank."""
    found: dict[int, list[int]] = defaultdict(list)
    last = find_last_backwards(computations)
    for bucket in gradient_buckets(graph, placement):
        for rank in bucket.ranks:
            held = [stage for stage in bucket.stages if placement.stages[stage].rank == rank]
            latest = max(int(last[stage]) for stage in held)
            ready = [builder.mark(int(computations.handle[latest]), bucket.index)] if latest >= 0 else []
            item = AllReduce(stage=held[0], bucket=bucket.index, num_bytes=bucket.num_bytes)
            found[rank].append(builder.append(rank, "exchange", item, group=bucket.ranks, waits=ready))
    return found


def _order(placement: Placement, stages: tuple[StageSlice, ...], rank: int) -> OrderColumns:
    mine = placement.stages_of(rank)
    differentiated = [index for index in reversed(mine) if stages[index].has_backward]
    count = placement.num_microbatches
    num_forwards, num_backwards = count * len(mine), count * len(differentiated)
    return make_columns(
        np.repeat([Opcode.FORWARD, Opcode.BACKWARD], [num_forwards, num_backwards]),
        np.concatenate([np.tile(mine, count), np.tile(differentiated, count)]).astype(np.int32),
        np.concatenate(
            [np.repeat(np.arange(count), len(mine)), np.repeat(np.arange(count)[::-1], len(differentiated))]
        ),
    )
