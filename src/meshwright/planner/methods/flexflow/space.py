"""The SOAP space of a graph on a cluster: layers, what can be split of them, and the arrays that are searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.methods.flexflow.assemble import Edge, Weight, assemble
from meshwright.planner.methods.flexflow.layers import find_layers
from meshwright.planner.methods.flexflow.machine import make_machine
from meshwright.planner.methods.flexflow.parts import make_tables
from meshwright.spec import PlanError
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import CostModel
    from meshwright.planner.methods.flexflow.arrays import Soap
    from meshwright.planner.methods.flexflow.layers import SoapDim, SoapLayer
    from meshwright.spec import Cluster, Graph, Workload

# The original's penalty of 1 ms for each MB beyond a device's memory (FlexFlow, simulator.cc).
PENALTY_PS_PER_BYTE = 1000
# Tables of transfers have an entry per pair of parts of each edge.
_MOST_PAIRS = 2**25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoapSpace:
    """Layers of a graph with their arrays; ``seconds`` of a strategy stand for one step over the global batch."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    cost: CostModel
    layers: tuple[SoapLayer, ...]
    soap: Soap


def soap_space(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    cost: CostModel,
    *,
    overlap: bool = True,
    most_parts: int | None = None,
    num_devices: int | None = None,
    can_run: bool = False,
) -> SoapSpace:
    """The space of a graph's strategies; parts number up to the devices, or ``most_parts``.

    ``num_devices``: only the first ones of the cluster. ``can_run``: only strategies that can be lowered to parts that
    run (`layers`).
    ``overlap``: whether gradients are summed while the backward goes on, or after all of it. Raises PlanError for a
    graph without ops, one that holds its own backward, a batch that it does not describe, or tables beyond 2^25 pairs.
    """
    graph.check_batch_size(workload.global_batch)
    if any(op.phase == "backward" for op in graph.ops):
        raise PlanError(f"Graph {graph.name!r} holds its own backward; give the graph of the model alone.")
    if not any(not op.replicable for op in graph.ops):
        raise PlanError(f"Graph {graph.name!r} has no ops that need a device; give one of a model.")
    num_devices = min(cluster.num_ranks, num_devices or cluster.num_ranks)
    parts = min(num_devices, most_parts or num_devices)
    layers = find_layers(graph, workload.global_batch, can_run=can_run)
    tables = make_tables(graph, layers, workload, cost, parts)
    edges = _find_edges(graph, layers, workload)
    pairs = len(edges) * int(max(table.degrees.prod(axis=1).max() for table in tables)) ** 2
    if pairs > _MOST_PAIRS:
        raise PlanError(
            f"{len(edges)} tensors between layers in up to {parts} parts each have {pairs} transfers; expected at most "
            f"{_MOST_PAIRS}. Give most_parts."
        )
    num_dims = tables[0].degrees.shape[1]
    weights = [
        w
        for at, (layer, table) in enumerate(zip(layers, tables, strict=True))
        if table.trains
        for w in _find_weights(graph, at, layer, workload, num_dims)
    ]
    soap = assemble(
        tables,
        edges,
        weights,
        make_machine(cluster, cost, num_devices),
        barrier=not overlap,
        penalty_ps_per_byte=PENALTY_PS_PER_BYTE,
    )
    return SoapSpace(graph=graph, cluster=cluster, workload=workload, cost=cost, layers=tuple(layers), soap=soap)


def _find_edges(graph: Graph, layers: Sequence[SoapLayer], workload: Workload) -> list[Edge]:
    """One per tensor and layer that reads it from another."""
    home = {op: at for at, layer in enumerate(layers) for op in layer.ops}
    maker = {tensor: home[op] for op in home for tensor in graph.ops[op].outputs}
    edges = []
    for at, layer in enumerate(layers):
        read = dict.fromkeys(tensor for op in layer.ops for tensor in graph.ops[op].inputs)
        made = [tensor for tensor in read if maker.get(tensor, at) != at]
        edges += [_edge(graph, tensor, layers[maker[tensor]], layer, maker[tensor], at, workload) for tensor in made]
    return edges


def _edge(
    graph: Graph, number: int, producer: SoapLayer, consumer: SoapLayer, source: int, target: int, workload: Workload
) -> Edge:
    tensor = graph.tensors[number]
    length = tuple(extent.at(workload.global_batch) for extent in tensor.shape) or (1,)
    made_by, read_by = (
        [_splitter(layer.dims, number, dim) for dim in range(len(length))] for layer in (producer, consumer)
    )
    window = []
    for dim, soap_dim in enumerate(read_by):
        slides = consumer.dims[soap_dim].windows.get(number) if soap_dim >= 0 else None
        window.append((consumer.dims[soap_dim].size, *slides) if slides else (length[dim], 1, 0, 1))
    width = DTYPE_BYTES[tensor.dtype]
    if tensor.dtype in FLOAT_DTYPES and workload.float_bytes is not None:
        width = workload.float_bytes
    return Edge(
        source=source,
        target=target,
        length=length,
        made_by=tuple(made_by),
        read_by=tuple(read_by),
        window=tuple(window),
        element_bytes=width,
        has_gradient=graph.mode == "training" and tensor.requires_grad,
    )


def _splitter(dims: Sequence[SoapDim], tensor: int, dim: int) -> int:
    """The SOAP dim that splits a tensor's dim; -1 if none does, or not in one run."""
    return next((k for k, item in enumerate(dims) if item.places.get(tensor) == (dim, 1)), -1)


def _find_weights(graph: Graph, at: int, layer: SoapLayer, workload: Workload, num_dims: int) -> list[Weight]:
    """The gradients of a layer, those that are split alike together."""
    sizes: dict[tuple[bool, ...], int] = {}
    for tensor in dict.fromkeys(t for op in layer.ops for t in graph.ops[op].inputs):
        item = graph.tensors[tensor]
        if item.role == "parameter" and item.requires_grad:
            splits = np.array([tensor in dim.places for dim in layer.dims] + [False] * (num_dims - len(layer.dims)))
            key = tuple(bool(split) for split in splits)
            sizes[key] = sizes.get(key, 0) + workload.gradient_bytes(item)
    return [Weight(layer=at, num_bytes=num_bytes, splits=splits) for splits, num_bytes in sizes.items()]
