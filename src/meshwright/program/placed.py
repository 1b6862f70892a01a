"""Placement → Program: what every rank computes, and one send and receive per tensor and destination.

The order of a rank: the forwards of its stages, microbatch by microbatch, each in the order of the placement; in
training then the backwards in the opposite order, last microbatch first, and one step of the optimizer over all of its
parameters. The orders of all ranks are parts of one order in which nothing is read before it is made
(`spec.placement`), so ranks cannot deadlock. Transfers are those of pipelines (`transfers`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.program.builder import ProgramBuilder
from meshwright.program.crossings import append_orders, append_transfers, find_crossings
from meshwright.program.schedules import OrderColumns
from meshwright.program.schedules.columns import join_ranks, make_columns
from meshwright.spec.codec import content_hash
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import Opcode, OptimizerStep
from meshwright.spec.placed_slices import slice_placement
from meshwright.spec.placement import Placement
from meshwright.spec.program import Program
from meshwright.spec.slices import StageSlice

# The name of the schedule in programs of placements.
PLACED = "placed"


@lru_cache(maxsize=16)
def build_placed_program(placement: Placement, graph: Graph) -> Program:
    """Return the program of a placement. Raises PlanError if it does not match the graph."""
    stages = slice_placement(graph, placement)
    orders = join_ranks(_order(placement, stages, rank) for rank in range(placement.num_ranks))
    builder = ProgramBuilder(placement.num_ranks)
    computations = append_orders(builder, placement, orders)
    append_transfers(builder, computations, find_crossings(placement, graph, stages))
    for rank in range(placement.num_ranks):
        trained = trained_stages(placement, graph, rank)
        if trained:
            builder.append(rank, "compute", OptimizerStep(stage=trained[0]))
    return builder.build(schedule=PLACED, plan_hash=content_hash(placement))


def trained_stages(placement: Placement, graph: Graph, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank with parameters to train; the optimizer's step is named after the first."""
    stages = slice_placement(graph, placement)
    if graph.mode != "training":
        return ()
    return tuple(
        index
        for index in placement.stages_of(rank)
        if any(graph.tensors[item].requires_grad for item in stages[index].parameters)
    )


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
