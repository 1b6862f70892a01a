"""The SOAP space of a graph on a cluster (`soap_space`): layers, their possible splits and times, devices and links.

`make_tables` computes the times of parts, `make_machine` describes devices and links, and `assemble` makes the arrays
that the chains read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.cost.optimizers import state_bytes
from meshwright.planner.methods.flexflow.layers import SoapDim, SoapLayer, find_layers
from meshwright.planner.methods.flexflow.lowering import HELD_ROLES
from meshwright.planner.methods.flexflow.soap_arrays import Floats, Integers, Soap
from meshwright.simulator.routes import hop_links
from meshwright.spec import (
    DTYPE_BYTES,
    FLOAT_DTYPES,
    Cluster,
    DeviceKind,
    Extent,
    Graph,
    Layer,
    Op,
    PlanError,
    Tensor,
    Workload,
    to_picoseconds,
)
from meshwright.spec.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from meshwright.cost import CostModel


class LayerTable(NamedTuple):
    """The k candidates of a layer with the costs of one part; M is the number of SOAP dims.

    ``degrees`` (k, M). In picoseconds: ``pass_ps`` (k, kinds, 2), forward and backward; ``update_ps`` (k, kinds), the
    optimizer step. ``held_bytes`` (k,). ``trains``: the layer has a backward.
    """

    degrees: Integers
    pass_ps: Integers
    update_ps: Integers
    held_bytes: Integers
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor that layer ``source`` makes and layer ``target`` reads; tuples have one entry per dim of the tensor.

    The fields are described in `soap_arrays.Soap`.
    """

    source: int
    target: int
    length: tuple[int, ...]
    made_by: tuple[int, ...]
    read_by: tuple[int, ...]
    window: tuple[tuple[int, int, int, int], ...]
    element_bytes: int
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Parameters of a layer whose gradients are all-reduced together.

    ``num_bytes`` are those of the unsplit gradients; ``splits`` tells for each SOAP dim whether it splits the
    parameters.
    """

    layer: int
    num_bytes: int
    splits: tuple[bool, ...]


class SoapMachine(NamedTuple):
    """The devices and the links between them, as arrays; `soap_arrays.Soap` describes the fields."""

    kind: Integers
    limit_bytes: Integers
    latency_ps: Integers
    byte_ps: Floats
    hops: Integers
    num_links: int


def assemble(
    layers: Sequence[LayerTable],
    edges: Sequence[Edge],
    weights: Sequence[Weight],
    machine: SoapMachine,
    *,
    barrier: bool = False,
    penalty_ps_per_byte: int = 0,
) -> Soap:
    """Return the arrays of a SOAP problem.

    Edges must go from earlier to later layers, and weights must be in the order of their layers. ``barrier``: reduce
    gradients only after all passes. ``penalty_ps_per_byte``: added to the step for memory beyond the limit.
    """
    num_layers, rank = len(layers), max([len(edge.length) for edge in edges], default=1)
    num_dims = layers[0].degrees.shape[1]
    degrees = np.concatenate([layer.degrees for layer in layers])
    parts = degrees.prod(axis=1)
    shift = int(parts.max() - 1).bit_length()
    # Part i of degrees (a, b, c) stands at (i // b // c % a, i // c % b, i % c).
    inner = np.cumprod(degrees[:, ::-1], axis=1)[:, ::-1] // degrees
    place = np.arange(1 << shift)[None, :, None] // inner[:, None] % degrees[:, None]

    def rows(values: Sequence[tuple[int, ...]], fill: int) -> Integers:
        table = np.full((len(values), rank), fill, np.int64)
        for row, items in zip(table, values, strict=True):
            row[: len(items)] = items
        return table

    windows = np.tile(np.array([1, 1, 0, 1], np.int64), (len(edges), rank, 1))
    for row, edge in zip(windows, edges, strict=True):
        row[: len(edge.window)] = edge.window
    source = np.array([edge.source for edge in edges], np.int64)
    target = np.array([edge.target for edge in edges], np.int64)
    in_offsets, in_edges = _by_layer(target, num_layers)
    out_offsets, out_edges = _by_layer(source, num_layers)
    weight_layer = np.array([weight.layer for weight in weights], np.int64)
    return Soap(
        candidates=np.cumsum([0, *(len(layer.degrees) for layer in layers)], dtype=np.int64),
        degrees=degrees,
        parts=parts,
        place=place,
        pass_ps=np.maximum(np.concatenate([layer.pass_ps for layer in layers]), 1),
        update_ps=np.concatenate([layer.update_ps for layer in layers]),
        held_bytes=np.concatenate([layer.held_bytes for layer in layers]),
        trains=np.array([layer.trains for layer in layers]),
        source=source,
        target=target,
        element_bytes=np.array([edge.element_bytes for edge in edges], np.int64),
        has_gradient=np.array([edge.has_gradient for edge in edges], np.bool_),
        made_by=rows([edge.made_by for edge in edges], -1),
        read_by=rows([edge.read_by for edge in edges], -1),
        length=rows([edge.length for edge in edges], 1),
        window=windows,
        in_offsets=in_offsets,
        in_edges=in_edges,
        out_offsets=out_offsets,
        out_edges=out_edges,
        weight_offsets=np.searchsorted(weight_layer, np.arange(num_layers + 1)).astype(np.int64),
        weight_layer=weight_layer,
        weight_bytes=np.array([weight.num_bytes for weight in weights], np.int64),
        splits_weight=np.array([weight.splits for weight in weights], np.bool_).reshape(-1, num_dims),
        kind=machine.kind,
        limit_bytes=machine.limit_bytes,
        latency_ps=machine.latency_ps,
        byte_ps=machine.byte_ps,
        hops=machine.hops,
        num_links=machine.num_links,
        shift=shift,
        barrier=barrier,
        penalty_ps_per_byte=penalty_ps_per_byte,
    )


def _by_layer(ends: Integers, num_layers: int) -> tuple[Integers, Integers]:
    """Offsets by layer, and the edges of each, ascending."""
    edges = np.argsort(ends, kind="stable").astype(np.int64)
    return np.searchsorted(ends[edges], np.arange(num_layers + 1)).astype(np.int64), edges


# A part is the layer's ops on its share of each tensor; what is not split stays whole. FLOPs are divided equally. One
# graph contains a part of every candidate of every distinct layer. The cost model estimates its ops as those of any
# graph, so a part of an eighth of the rows costs what an op of that many rows costs, not an eighth. Layers that differ
# only in their names have the same parts.
def make_tables(
    graph: Graph, layers: Sequence[SoapLayer], workload: Workload, cost: CostModel, most_parts: int
) -> list[LayerTable]:
    """Return one table per layer: its candidates with up to ``most_parts`` parts, and their costs per device kind."""
    num_dims = max([len(layer.dims) for layer in layers], default=1) or 1
    writer = _Writer(graph, workload.global_batch)
    known: dict[Hashable, tuple[Integers, list[int]]] = {}
    found: list[tuple[Integers, list[int]]] = []
    for layer in layers:
        key = writer.signature(layer)
        if key not in known:
            degrees = candidate_degrees([dim.size for dim in layer.dims], most_parts, num_dims)
            known[key] = degrees, [writer.write(layer, row) for row in degrees]
        found.append(known[key])
    parts = writer.graph_of_parts()
    kinds = cost.cluster.device_kinds
    costs = [_estimate(parts, writer, workload, cost, kind) for kind in kinds]
    bytes_of = [_held_bytes(parts, part, workload) for part in range(len(parts.layers))]
    trains = [
        graph.mode == "training"
        and any(graph.tensors[t].requires_grad for op in layer.ops for t in graph.ops[op].outputs)
        for layer in layers
    ]
    return [
        LayerTable(
            degrees=degrees,
            pass_ps=np.stack([times[numbers, :2] for times in costs], axis=1),
            update_ps=np.stack([times[numbers, 2] for times in costs], axis=1),
            held_bytes=np.array([bytes_of[number] for number in numbers], np.int64),
            trains=is_trained,
        )
        for (degrees, numbers), is_trained in zip(found, trains, strict=True)
    ]


def candidate_degrees(sizes: Sequence[int], most_parts: int, num_dims: int) -> Integers:
    """Return all combinations of degrees for dims of these sizes, shape (candidates, num_dims).

    Each degree divides its size, and the product is at most ``most_parts``. Missing dims have degree 1.
    """
    legal = [[degree for degree in range(1, most_parts + 1) if size % degree == 0] for size in sizes]
    rows = [row for row in product(*legal) if np.prod(row) <= most_parts]
    return np.array([row + (1,) * (num_dims - len(row)) for row in rows], np.int64).reshape(-1, num_dims)


def _estimate(parts: Graph, writer: _Writer, workload: Workload, cost: CostModel, kind: DeviceKind) -> Integers:
    """Forward, backward and optimizer step of each part on a kind of device, ps of shape (parts, 3)."""
    if not parts.ops:
        return np.zeros((len(parts.layers), 3), np.int64)
    costs = cost.estimate_ops(parts, 1, kind)
    seconds = np.stack([costs.forward_s, costs.backward_s], axis=1)
    found = np.zeros((len(parts.layers), 3), np.int64)
    for number, part in enumerate(parts.layers):
        forward, backward = seconds[part.start : part.stop].sum(axis=0)
        update = 0.0
        if parts.mode == "training":
            update = cost.optimizer_seconds(parts, writer.parameters[number], workload.optimizer, kind)
        found[number] = to_picoseconds(forward), to_picoseconds(backward), to_picoseconds(update)
    return found


def _held_bytes(parts: Graph, number: int, workload: Workload) -> int:
    """Parameters, gradients and states of a part, and what its backward needs."""
    layer, width = parts.layers[number], workload.float_bytes
    ops = parts.ops[layer.start : layer.stop]
    held = [parts.tensors[t] for t in dict.fromkeys(t for op in ops for t in op.inputs)]
    found = sum(tensor.num_bytes(1, width) for tensor in held if tensor.role in HELD_ROLES)
    if parts.mode == "training":
        states = workload.numbers.gradient_bytes + state_bytes(workload.optimizer, workload.precision)
        trained = (tensor for tensor in held if tensor.role == "parameter" and tensor.requires_grad)
        found += sum(tensor.num_elements(1) * states for tensor in trained) + parts.saved_bytes(
            ops, 1, float_bytes=width
        )
    return found


class _Writer:
    """Adds parts of layers to one graph as ops, for a batch of the whole layer's size."""

    def __init__(self, graph: Graph, batch_size: int) -> None:
        self.graph, self.batch_size = graph, batch_size
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.layers: list[Layer] = []
        self.parameters: list[tuple[int, ...]] = []

    def signature(self, layer: SoapLayer) -> Hashable:
        """Return a key that is equal for layers whose parts cost the same."""
        seen: dict[int, int] = {}

        def named(tensors: Sequence[int]) -> Hashable:
            return tuple(
                (seen.setdefault(t, len(seen)), item.shape, item.dtype, item.role, item.requires_grad)
                for t in tensors
                for item in (self.graph.tensors[t],)
            )

        ops = tuple(
            (op.kind, op.attributes, named(op.inputs), named(op.outputs), named(op.saved), op.flops, op.backward_flops)
            for op in (self.graph.ops[index] for index in layer.ops)
        )
        dims = tuple(
            (dim.size, tuple(sorted((seen[t], place) for t, place in dim.places.items() if t in seen)))
            for dim in layer.dims
        )
        return ops, dims

    def write(self, layer: SoapLayer, degrees: Integers) -> int:
        """Add the ops of one part of a layer under ``degrees``; return the number of the part in the graph."""
        local: dict[int, int] = {}
        start = len(self.ops)
        for index in layer.ops:
            op = self.graph.ops[index]
            share = int(
                np.prod([d for dim, d in zip(layer.dims, degrees, strict=False) if index in dim.ops], initial=1)
            )
            for tensor in (*op.inputs, *op.outputs, *op.saved):
                if tensor not in local:
                    is_made = tensor in op.outputs or (tensor in op.saved and tensor not in op.inputs)
                    local[tensor] = self._local(layer, degrees, tensor, local, share, is_made=is_made)
            self.ops.append(
                replace(
                    op,
                    inputs=tuple(local[t] for t in op.inputs),
                    outputs=tuple(local[t] for t in op.outputs),
                    saved=tuple(local[t] for t in op.saved),
                    flops=Extent(op.flops.at(self.batch_size) // share),
                    backward_flops=Extent(op.backward_flops.at(self.batch_size) // share),
                )
            )
        self.parameters.append(tuple(local[t] for t in local if self.graph.tensors[t].role == "parameter"))
        self.layers.append(Layer(name=f"part{len(self.layers)}", start=start, stop=len(self.ops)))
        return len(self.layers) - 1

    def _local(
        self, layer: SoapLayer, degrees: Integers, tensor: int, local: dict[int, int], share: int, *, is_made: bool
    ) -> int:
        """The part of a tensor; of one that only the backward sees, and that no dim splits, an equal share."""
        whole = self.graph.tensors[tensor]
        shape = [extent.at(self.batch_size) for extent in whole.shape]
        if whole.role == "saved":
            elements = int(np.prod(shape, initial=1))
            shape = [-(-elements // share)]
        for dim, degree in zip(layer.dims, degrees, strict=False):
            if tensor in dim.places:
                place, (stride, _, width) = dim.places[tensor][0], dim.windows.get(tensor, (1, 0, 1))
                own = dim.size // degree if tensor in dim.windows else shape[place] // degree
                shape[place] = min(shape[place], (int(own) - 1) * stride + width)
        number = len(self.tensors)
        shared = local.get(whole.storage, number)
        self.tensors.append(
            replace(
                whole,
                shape=tuple(map(Extent, map(int, shape))),
                role=whole.role if is_made or whole.role in HELD_ROLES else "input",
                storage=self.tensors[shared].storage if shared != number else number,
            )
        )
        return number

    def graph_of_parts(self) -> Graph:
        """Return the graph of all parts that were written, one layer per part."""
        return Graph(
            name=f"parts of {self.graph.name}",
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            layers=tuple(self.layers),
            inputs=(),
            outputs=(),
            mode=self.graph.mode,
            batch_size=1,
        )


_SHORT, _LONG = 1024, 64 * 2**20


# Devices as FlexFlow models them: messages take latency + bytes / bandwidth, and occupy their links. Both figures are
# fitted to the cost model's costs of two sends, a short and a long one; pairs of devices of the same kinds on the same
# kinds of nodes cost the same. Links are those of the simulator's routes: one per direction between two devices of a
# node, the NICs of both nodes, uplinks of racks.
def make_machine(cluster: Cluster, cost: CostModel, num_devices: int) -> SoapMachine:
    """Return the first ``num_devices`` devices of a cluster and the links between them."""
    columns = cluster.columns()
    latency = np.zeros((num_devices, num_devices), np.int64)
    per_byte = np.zeros((num_devices, num_devices))
    known: dict[Hashable, tuple[int, float]] = {}
    for here, there in zip(*np.nonzero(~np.eye(num_devices, dtype=bool)), strict=True):
        nodes = int(columns.node[here]), int(columns.node[there])
        key = columns.kind[here], columns.kind[there], nodes
        if key not in known:
            known[key] = _line(cost, int(here), int(there))
        latency[here, there], per_byte[here, there] = known[key]
    everyone = np.arange(num_devices)
    hops = hop_links(cluster, everyone[:, None] + 0 * everyone, everyone + 0 * everyone[:, None])
    numbers, dense = np.unique(hops, return_inverse=True)
    first = int(numbers[0] == -1)
    return SoapMachine(
        kind=columns.kind[:num_devices].astype(np.int64),
        limit_bytes=np.array([cluster.device_kind(rank).memory_bytes for rank in range(num_devices)], np.int64),
        latency_ps=latency,
        byte_ps=per_byte,
        hops=np.moveaxis(dense.reshape(hops.shape) - first, 0, -1).astype(np.int64).copy(),
        num_links=len(numbers) - first,
    )


def _line(cost: CostModel, here: int, there: int) -> tuple[int, float]:
    """Latency in ps and ps per byte of messages from one device to another."""
    short, long = (cost.collective_seconds("send", (here, there), size) for size in (_SHORT, _LONG))
    per_byte = max(long - short, 0.0) / (_LONG - _SHORT)
    latency = max(short - _SHORT * per_byte, 0.0)
    return round(latency * PICOSECONDS_PER_SECOND), per_byte * PICOSECONDS_PER_SECOND


# The original's penalty of 1 ms for each MB beyond a device's memory (FlexFlow, simulator.cc).
PENALTY_PS_PER_BYTE = 1000
# Tables of transfers have an entry per pair of parts of each edge.
_MOST_PAIRS = 2**25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoapSpace:
    """All SOAP strategies of a graph on a cluster: the layers, and the arrays that chains search (``soap``).

    A step covers the workload's global batch.
    """

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
    """Return the space of all strategies of a graph on a cluster.

    ``num_devices``: use only the first devices of the cluster. ``most_parts``: the largest number of parts of a layer,
    by default the number of devices. ``can_run``: only strategies whose parts can be run (`layers`). ``overlap``:
    reduce gradients during the backward; otherwise after it. Raises PlanError for a graph without ops or with its own
    backward ops, and for tables of more than 2^25 pairs of parts; GraphError for a batch size that the graph does not
    support.
    """
    graph.check_batch_size(workload.global_batch)
    if any(op.phase == "backward" for op in graph.ops):
        raise PlanError(f"Graph {graph.name!r} contains its own backward ops; give the graph of the forward alone.")
    if not any(not op.replicable for op in graph.ops):
        raise PlanError(f"Graph {graph.name!r} has no ops that need a device; give the graph of a model.")
    num_devices = min(cluster.num_ranks, num_devices or cluster.num_ranks)
    parts = min(num_devices, most_parts or num_devices)
    layers = find_layers(graph, workload.global_batch, can_run=can_run)
    tables = make_tables(graph, layers, workload, cost, parts)
    edges = _find_edges(graph, layers, workload)
    pairs = len(edges) * int(max(table.degrees.prod(axis=1).max() for table in tables)) ** 2
    if pairs > _MOST_PAIRS:
        raise PlanError(
            f"{len(edges)} tensors between layers of up to {parts} parts have {pairs} possible transfers; expected at "
            f"most {_MOST_PAIRS}. Give a smaller most_parts."
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
