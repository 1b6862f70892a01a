"""Seconds and bytes of every possible stage i:j of a graph at one microbatch size: the stage costs of all methods."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost import CostModel
from meshwright.planner.stage_tables.bytes import StageBytesTable, stage_bytes, weigh_alone
from meshwright.planner.stage_tables.seconds import StageSecondsTable, stage_seconds
from meshwright.planner.stage_tables.structure import Structure
from meshwright.spec import Cluster, Graph, Offload, StageSlice, Workload
from meshwright.spec.offload import ON_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """A graph's stages at one microbatch size: bytes, and seconds by the name of the device kind.

    ``activations_away``: what layers keep is in host memory between forward and backward.
    """

    graph: Graph
    microbatch_size: int
    num_microbatches: int
    bytes: StageBytesTable
    seconds: dict[str, StageSecondsTable]
    activations_away: bool = False


def make_tables(
    graph: Graph,
    structure: Structure,
    microbatch_size: int,
    cluster: Cluster,
    workload: Workload,
    cost: CostModel,
    offload: Offload = ON_DEVICE,
) -> Tables:
    """Estimate all stages of a graph at a microbatch size. Raises GraphError if the graph excludes the size."""
    away = offload.activations == "host"
    return Tables(
        graph=graph,
        microbatch_size=microbatch_size,
        num_microbatches=workload.global_batch // microbatch_size,
        bytes=stage_bytes(graph, structure, microbatch_size, workload, cost, activations_away=away),
        seconds={
            kind.name: stage_seconds(graph, structure, microbatch_size, workload, cost, kind, offload)
            for kind in cluster.device_kinds
        },
        activations_away=away,
    )


def settle_stage(
    tables: Tables, stage: StageSlice, layers: tuple[int, int], num_replicas: int, workload: Workload, cost: CostModel
) -> None:
    """Replace the bounds of a stage with this number of replicas by its exact bytes."""
    exchanges = num_replicas > 1
    memory = weigh_alone(
        tables.graph,
        stage,
        tables.microbatch_size,
        workload,
        cost,
        exchanges=exchanges,
        activations_away=tables.activations_away,
    )
    tables.bytes.settle(*layers, memory, exchanges=exchanges)
