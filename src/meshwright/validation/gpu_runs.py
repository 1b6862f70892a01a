"""Training steps of plain PyTorch on an H100, each as a plan for one device.

The steps are those of ``data/steps_cuda.csv``, and of ``data/steps_cuda_compiled.csv``, where torch compiled the model.
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
    """A measured run as a plan of one stage and one microbatch, with its graph, cluster and cost model."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    cost: CostModel


def read_run(row: StepRow, *, compiled: bool = False) -> GpuRun:
    """Return the run of a row; ``compiled``: its layers are compiled.

    In the measured loop, the model's logits stay in memory until the step is done, so they are outputs of the graph.
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
