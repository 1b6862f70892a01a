"""``meshwright show MODEL --cluster CLUSTER --memory``: what ways to keep a model on a device would need."""

from __future__ import annotations

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.spec.cluster import Cluster
from meshwright.spec.graph import Graph
from meshwright.spec.precision import Precision
from meshwright.spec.units import format_bytes
from meshwright.spec.workload import Optimizer, Workload


def show_memory(graph: Graph, machine: Cluster, precision: Precision, batch_size: int, as_json: bool) -> None:
    """Print layers and ways, for AdamW. Raises GraphError for a graph that is not for training."""
    from meshwright.cost.memory.choices import choice_rows, layer_rows
    from meshwright.report import make_table

    workload = Workload(global_batch=batch_size, precision=precision, optimizer=Optimizer(kind="adamw"))
    layers = layer_rows(graph, batch_size, workload, machine)
    ways = choice_rows(graph, batch_size, workload, machine)
    kind = machine.device_kind(0)
    if as_json:
        facts = {"model": graph.name, "cluster": machine.name, "batch_size": batch_size, "precision": precision}
        print_json("layer-memory", {**facts, "device": kind.name, "layers": layers, "ways": ways})
        return
    samples = "1 sample" if batch_size == 1 else f"{batch_size} samples"
    limit = format_bytes(kind.memory_bytes)
    print_tables(
        make_table(
            layers,
            title=f"{graph.name}, {precision}, {samples}: what a microbatch keeps, by what is computed again",
            collapse="layer",
        ),
        make_table(
            ways,
            title=f"One of {machine.num_ranks} ranks that share it by ZeRO, AdamW; {kind.name}: {limit}",
            hide=("parameters_bytes", "gradients_bytes"),
        ),
    )
