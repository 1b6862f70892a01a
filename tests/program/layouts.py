"""Plans of every named schedule that flushes, over a chain of layers (others: `endless_plans`)."""

from __future__ import annotations

from dataclasses import replace

from meshwright.program import SCHEDULES
from meshwright.spec import StagePlan
from meshwright.spec.schedules import layout_of
from tests.graphs import chain_graph, even_bounds, make_plan

LAYOUTS = {schedule: layout_of(schedule) for schedule in SCHEDULES}


def stage_ranks(schedule: str, num_positions: int, num_chunks: int = 2, num_replicas: int = 1):
    """The ranks of each stage; replica r of position i is rank i·R + r."""
    match LAYOUTS[schedule]:
        case "single":
            positions = [(i,) for i in range(num_positions)]
        case "in turn":
            positions = [(i % num_positions,) for i in range(num_chunks * num_positions)]
        case "v":
            positions = [(min(i, 2 * num_positions - 1 - i),) for i in range(2 * num_positions)]
        case _:
            return [(i, num_positions - 1 - i) for i in range(num_positions)]
    return [tuple(i * num_replicas + r for i in own for r in range(num_replicas)) for own in positions]


def plan_of(schedule: str, num_positions: int, num_microbatches: int, *, num_chunks: int = 2, num_replicas: int = 1):
    """(plan, graph) of a schedule in its layout, every stage one layer."""
    ranks = stage_ranks(schedule, num_positions, num_chunks, num_replicas)
    graph = chain_graph(len(ranks))
    bounds = even_bounds(len(ranks), len(ranks))
    plan = make_plan(graph, bounds, [1] * len(ranks), num_microbatches)
    stages = tuple(StagePlan(start=a, stop=b, ranks=own) for (a, b), own in zip(bounds, ranks, strict=True))
    return replace(plan, stages=stages, schedule=schedule), graph
