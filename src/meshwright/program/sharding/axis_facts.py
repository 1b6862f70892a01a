"""Facts of a graph that propagation needs (`AxisGraph`): labelled dims of ops, producers and readers of tensors."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

from meshwright.program.sharding.dims import SAMPLES, OpDims, OpSplit, find_label, op_dims
from meshwright.program.sharding.expert_ops import find_grouped
from meshwright.program.sharding.placement_table import operator_name, operator_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.program.sharding.op_signatures import Dim
    from meshwright.spec import Extent, Graph

# A parameter's dim may be split unevenly if it has at least this size per rank: vocabularies are padded or cut off by
# their size (Megatron-LM pads to multiples of 128 per rank), and smaller dims would be split too unevenly.
UNEVEN_FROM = 128


class AxisGraph:
    """A graph to be split over one mesh axis of ``size`` ranks, with its labelled dims (`dims`) and dependencies.

    ``own_samples``: each rank of the axis computes different samples, as on the expert axis.
    """

    def __init__(self, graph: Graph, size: int, *, own_samples: bool = False) -> None:
        self.graph, self.size, self.own_samples = graph, size, own_samples
        self.samples = samples = graph.batch_size or SAMPLES
        self.shapes = [tuple(extent.at(samples) for extent in tensor.shape) for tensor in graph.tensors]
        self.producer = {tensor: i for i, op in enumerate(graph.ops) for tensor in op.outputs}
        self.dims = [self._op_dims(i) for i in range(len(graph.ops))]
        self.rows = [operator_rows().get(operator_name(op.kind)) for op in graph.ops]
        self.mixtures = find_grouped(graph) if own_samples else ()
        self.sorted_ops = {index: dims for mixture in self.mixtures for index, dims in mixture.dims.items()}
        for index, dims in self.sorted_ops.items():
            self.dims[index] = dims

    def _op_dims(self, index: int) -> OpDims:
        op = self.graph.ops[index]
        inputs, outputs = (tuple(self.shapes[i] for i in ids) for ids in (op.inputs, op.outputs))
        return op_dims(op.kind, op.attributes, inputs, outputs)

    def is_parameter(self, tensor: int) -> bool:
        """Return whether the tensor is a parameter."""
        return self.graph.tensors[tensor].role == "parameter"

    def takes_layout(self, tensor: int) -> bool:
        """Return whether the tensor gets the layout that its first reader needs: a parameter, or a written buffer."""
        return self.is_parameter(tensor) or tensor in self._written_buffers

    @cached_property
    def _written_buffers(self) -> set[int]:
        """Buffers that an op writes. An op on shards must write the process's own shard, not a copy of a slice."""
        tensors = self.graph.tensors
        read = (i for op in self.graph.ops if op.writes_buffers for i in op.inputs)
        return {i for i in read if tensors[i].role == "buffer"}

    def requires_gradient(self, tensor: int) -> bool:
        """Return whether training computes a gradient of the tensor."""
        return self.graph.mode == "training" and self.graph.tensors[tensor].requires_grad

    def depends_on_batch(self, tensor: int) -> bool:
        """Return whether the size of some dim of the tensor grows with the batch size."""
        return any(extent.per_sample for extent in self.graph.tensors[tensor].shape)

    def elements(self, tensor: int) -> int:
        """Return the number of elements of a tensor, for comparisons.

        For a symbolic batch, this is the number at `SAMPLES` samples.
        """
        return math.prod(self.shapes[tensor])

    @cached_property
    def read_parameters(self) -> list[int]:
        """Ids of the parameters that have a gradient and that some op reads."""
        return [i for i in self.graph.parameters if i in self.readers and self.requires_gradient(i)]

    @cached_property
    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """By tensor id, the readers of the tensor: (index of the op, position among its inputs)."""
        found: dict[int, list[tuple[int, int]]] = {}
        for index, op in enumerate(self.graph.ops):
            for position, tensor in enumerate(op.inputs):
                found.setdefault(tensor, []).append((index, position))
        return found

    @cached_property
    def ancestors(self) -> list[int]:
        """Per op, the ops that it depends on directly or indirectly: a number whose bit i stands for op i."""
        found: list[int] = []
        for op in self.graph.ops:
            above = 0
            for tensor in op.inputs:
                if (made := self.producer.get(tensor)) is not None:
                    above |= found[made] | 1 << made
            found.append(above)
        return found

    @cached_property
    def input_free(self) -> list[bool]:
        """Per tensor, whether it is independent of the graph's inputs."""
        free = [tensor.role != "input" for tensor in self.graph.tensors]
        for op in self.graph.ops:
            for tensor in op.outputs:
                free[tensor] = all(free[i] for i in op.inputs)
        return free

    def can_split(self, index: int, split: OpSplit) -> bool:
        """Return whether op ``index`` can be split: each of its tensors with the split's label must be divisible."""
        dims = self.dims[index]
        if split.label in dims.fixed:
            return False
        op = self.graph.ops[index]
        tensors = zip((*op.inputs, *op.outputs), (*dims.inputs, *dims.outputs), strict=True)
        return all(self._divides(tensor, item, split) for tensor, item in tensors)

    def _divides(self, tensor: int, dims: tuple[Dim, ...], split: OpSplit) -> bool:
        found = find_label(dims, split.label)
        if found is None:
            return True
        dim, _, size = found
        extent = self.graph.tensors[tensor].shape[dim]
        if size % (split.parts * self.size) == 0:
            return divides(extent, self.size)
        return split.parts == 1 and len(dims[dim]) == 1 and not extent.per_sample and size >= UNEVEN_FROM * self.size

    def operands(self, index: int) -> Iterator[tuple[int, int, tuple[Dim, ...]]]:
        """Yield (position, tensor id, labelled dims) of each input of op ``index``."""
        for position, (tensor, dims) in enumerate(
            zip(self.graph.ops[index].inputs, self.dims[index].inputs, strict=True)
        ):
            yield position, tensor, dims


def divides(extent: Extent, size: int) -> bool:
    """Return whether ``size`` ranks get equal parts of a dim of size ``extent`` at every batch size."""
    return extent.fixed % size == 0 and extent.per_sample % size == 0
