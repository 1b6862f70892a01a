"""Training steps of plain PyTorch on an H100, each as a plan for one device.

``data/steps_cuda.csv``, and ``data/steps_cuda_compiled.csv`` of steps whose model was compiled by torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from meshwright.cost import CostModel
from meshwright.cost.work import name_in, operators
from meshwright.spec import Cluster, Graph, Optimizer, Plan, StagePlan, Workload, load_cluster
from meshwright.validation.datasets import StepRow, load_graph

if TYPE_CHECKING:
    from meshwright.spec.precision import Precision

TABLE, COMPILED_TABLE = "steps_cuda", "steps_cuda_compiled"
_CLUSTER = "1xH100"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """What was run: a plan of one stage and one microbatch, its graph, the device and its costs."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    cost: CostModel


def read_run(row: StepRow, *, compiled: bool = False) -> GpuRun:
    """Return the run of a row, with compiled layers or without.

    The measured loop holds what the model gives, besides the loss, until a step is done.
    """
    graph, cluster = load_graph(row["model"]), load_cluster(_CLUSTER)
    losses = [op for op in graph.ops if (known := operators().get(name_in(op.kind))) and known.output == "loss"]
    graph = replace(graph, outputs=(*graph.outputs, *(op.inputs[0] for op in losses)))
    precision = cast("Precision", row["precision"])
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=cluster.name,
        workload=Workload(global_batch=int(row["batch_size"]), optimizer=Optimizer(kind="adamw"), precision=precision),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0,)),),
        num_microbatches=1,
        compiled=compiled,
    )
    return GpuRun(plan=plan, graph=graph, cluster=cluster, cost=CostModel(cluster=cluster, precision=precision))
