"""What the parts of layers take: a graph of parts, one of every candidate of every distinct layer, estimated at once.

A part is the layer's ops on its share of each tensor; what is not split stays whole. FLOPs are shared out alike. The
cost model estimates these ops as those of any graph, so a part of an eighth of the rows costs what an op of so many
rows costs, not an eighth. Layers that differ in nothing but their names have the same parts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.optimizers import state_bytes
from meshwright.planner.methods.flexflow.assemble import LayerTable
from meshwright.spec import Extent, Graph, Layer, Op, Tensor, to_picoseconds

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from meshwright.cost import CostModel
    from meshwright.planner.methods.flexflow.arrays import Integers
    from meshwright.planner.methods.flexflow.layers import SoapLayer
    from meshwright.spec import DeviceKind, Workload

_HELD = ("parameter", "buffer", "constant")


def make_tables(
    graph: Graph, layers: Sequence[SoapLayer], workload: Workload, cost: CostModel, most_parts: int
) -> list[LayerTable]:
    """The candidates of all layers with up to ``most_parts`` parts, and what these take on each kind of device."""
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
    """All degrees that divide these sizes with a product of ``most_parts`` at most, shape (candidates, num_dims)."""
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
    found = sum(tensor.num_bytes(1, width) for tensor in held if tensor.role in _HELD)
    if parts.mode == "training":
        states = workload.numbers.gradient_bytes + state_bytes(workload.optimizer, workload.precision)
        trained = (tensor for tensor in held if tensor.role == "parameter" and tensor.requires_grad)
        found += sum(tensor.num_elements(1) * states for tensor in trained) + parts.saved_bytes(
            ops, 1, float_bytes=width
        )
    return found


class _Writer:
    """Writes parts of layers down as ops of one graph, for a batch of the whole layer's size."""

    def __init__(self, graph: Graph, batch_size: int) -> None:
        self.graph, self.batch_size = graph, batch_size
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.layers: list[Layer] = []
        self.parameters: list[tuple[int, ...]] = []

    def signature(self, layer: SoapLayer) -> Hashable:
        """Equal for layers whose parts take the same."""
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
        """Add the ops of a part; return its number."""
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
                role=whole.role if is_made or whole.role in _HELD else "input",
                storage=self.tensors[shared].storage if shared != number else number,
            )
        )
        return number

    def graph_of_parts(self) -> Graph:
        """All parts that were written."""
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
