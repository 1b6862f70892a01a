"""Pipelines whose ranks' peaks were measured here: which plan a row of ``memory_pipelines.csv`` describes.

Rows of ``memory_recompute.csv`` also say what is computed again, those of ``memory_sharing.csv`` what replicas share.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from meshwright.spec import GradientExchange, Optimizer, Plan, StagePlan, Workload, load_shipped_graph, read_recompute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.spec.exchange import ZeroStage

# Stages are cut evenly by layers and have so many replicas each.
PIPELINE_COLUMNS = (
    "model",
    "num_stages",
    "replicas",
    "microbatch_size",
    "num_microbatches",
    "schedule",
    "optimizer",
)
RECOMPUTE_COLUMNS = (*PIPELINE_COLUMNS, "recompute")
SHARING_COLUMNS = (*PIPELINE_COLUMNS, "zero", "shard_size")


def pipeline_plan(row: Mapping[str, Any]) -> Plan:
    """The plan of a row."""
    num_stages, replicas, size, count = (int(row[name]) for name in PIPELINE_COLUMNS[1:5])
    optimizer = Optimizer.named(row["optimizer"])
    plan = even_plan(row["model"], num_stages, replicas, size, count, row["schedule"], optimizer)
    again = read_recompute(load_shipped_graph(plan.model), row.get("recompute", "none"), plan.bounds)
    zero, shard_size = (int(row.get(name, 0)) for name in SHARING_COLUMNS[-2:])
    exchange = GradientExchange(zero=cast("ZeroStage", zero), shard_size=shard_size)
    return replace(plan, recompute=again.ranges, keeps=again.keeps, exchange=exchange)


def even_plan(
    model: str, num_stages: int, replicas: int, size: int, count: int, schedule: str, optimizer: Optimizer
) -> Plan:
    """A plan with stages of about as many layers each, for ``count`` microbatches of ``size`` samples."""
    graph = load_shipped_graph(model)
    cuts = [len(graph.layers) * stage // num_stages for stage in range(num_stages + 1)]
    return Plan(
        model=model,
        graph_hash=graph.content_hash,
        cluster=f"{num_stages * replicas}xcpu",
        workload=Workload(global_batch=size * count, optimizer=optimizer),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=tuple(range(stage * replicas, (stage + 1) * replicas)))
            for stage, (start, stop) in enumerate(pairwise(cuts))
        ),
        num_microbatches=count,
        schedule=schedule,
    )
