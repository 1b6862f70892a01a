"""Costs in ``meshwright show``: the layers of a model on a cluster's devices, or the collectives of a cluster.

With ``--memory``: the memory of a model under recompute, sharding and offload.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.cli.planning import choose_precision, make_cost_model
from meshwright.spec.cluster import Cluster, load_cluster
from meshwright.spec.errors import DocumentError
from meshwright.spec.graph import Graph
from meshwright.spec.precision import Precision
from meshwright.spec.units import format_bytes
from meshwright.spec.workload import Optimizer, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRequest:
    """The options about costs; all empty if none was given."""

    cluster: str | None = None
    collectives: bool = False
    ranks: str | None = None
    memory: bool = False
    measurements: Path | None = None
    precision: Precision | None = None

    @property
    def is_asked(self) -> bool:
        """Whether costs are to be shown."""
        return self.collectives or self.cluster is not None


def show_costs(value: Any, document: str, estimating: CostRequest, batch_size: int, as_json: bool) -> None:
    """Print one table per kind of device, or those of collectives.

    Raises DocumentError if the document is not a graph, or not a cluster.
    """
    if estimating.collectives:
        _show_collectives(value, document, estimating, as_json)
        return
    from meshwright.cost.layers import cost_rows, cost_table, explain_optimizer, optimizer_row

    if not isinstance(value, Graph):
        raise DocumentError(
            f"{document}: --cluster estimates the layers of a model, found a {type(value).__name__.lower()}. Give a "
            "zoo name or a captured graph; `meshwright simulate` estimates a plan."
        )
    machine = load_cluster(estimating.cluster or "")
    precision = choose_precision(estimating.precision, machine, value.mode)
    if estimating.memory:
        show_memory(value, machine, precision, batch_size, as_json)
        return
    cost = make_cost_model(machine, estimating.measurements, precision)
    if as_json:
        devices = []
        for kind in machine.device_kinds:
            layers, total = cost_rows(cost, value, batch_size, kind)
            step = optimizer_row(cost, value, kind)
            devices.append({"kind": kind.name, "layers": layers, "total": total, "optimizer": step})
        print_json(
            "layer-costs", {"model": value.name, "batch_size": batch_size, "precision": precision, "devices": devices}
        )
        return
    tables = [cost_table(cost, value, batch_size, kind) for kind in machine.device_kinds]
    steps = [(kind, optimizer_row(cost, value, kind)) for kind in machine.device_kinds]
    lines = [explain_optimizer(row, kind) for kind, row in steps if row is not None]
    print_tables(*tables, *lines, cost.explain_basis(value, batch_size))


def _show_collectives(value: Any, document: str, estimating: CostRequest, as_json: bool) -> None:
    """The time of every collective among ranks of a cluster, and the orders of ring and tree."""
    from meshwright.cost.collectives.listing import list_collectives, tables_of_listing

    if not isinstance(value, Cluster):
        raise DocumentError(
            f"{document}: --collectives needs a cluster, found a {type(value).__name__.lower()}. Give a file or "
            "a short form, 2x8xH100."
        )
    precision = choose_precision(estimating.precision, value)
    cost = make_cost_model(value, estimating.measurements, precision)
    listing = list_collectives(cost, _read_ranks(estimating.ranks, value))
    if as_json:
        print_json("collectives", {"cluster": value.name, "precision": precision, **listing})
        return
    print_tables(*tables_of_listing(listing, value.name))


def _read_ranks(text: str | None, cluster: Cluster) -> tuple[int, ...]:
    """Ranks as ``0,1,2``; all without a text."""
    if text is None:
        return tuple(range(cluster.num_ranks))
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DocumentError(f"--ranks {text!r}: expected numbers with commas between them, such as 0,1,2,3.") from None


def show_memory(graph: Graph, machine: Cluster, precision: Precision, batch_size: int, as_json: bool) -> None:
    """Print the memory of layers and of ways to reduce it, for AdamW.

    Raises GraphError for a graph that is not for training.
    """
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
            title=f"{graph.name}, {precision}, {samples}: what a microbatch keeps, by recompute",
            collapse="layer",
        ),
        make_table(
            ways,
            title=f"One of {machine.num_ranks} ranks that share it by ZeRO, AdamW; {kind.name}: {limit}",
            hide=("parameters_bytes", "gradients_bytes"),
        ),
    )
