"""Checks of graphs: tensors, ops and layers must be consistent, and no larger than any machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshwright.spec.errors import GraphError
from meshwright.spec.recompute import check_recompute
from meshwright.spec.units import DTYPE_BYTES, format_bytes

if TYPE_CHECKING:
    from meshwright.spec.graph import Graph

# The largest size of all tensors of a batch together, and their FLOPs: sums over the microbatches of a schedule stay
# far within int64. 1 PiB is 13,000 devices of 80 GiB.
MAX_GRAPH_BYTES = 2**50
MAX_GRAPH_FLOPS = 2**62


def check_graph(graph: Graph) -> None:
    """Raise GraphError when the parts of a graph contradict each other."""
    _check_tensors(graph)
    known = _check_ops(graph)
    _check_layers(graph)
    check_recompute(graph)
    if graph.compiled and any(op.phase == "backward" for op in graph.ops):
        raise GraphError(
            f"Graph {graph.name!r} holds its own backward, so its layers cannot be compiled separately. Capture "
            "the model alone."
        )
    _check_collectives(graph)
    graph.check_batch_size(graph.batch_size if graph.batch_size is not None else 1)
    for i in (*graph.inputs, *graph.outputs):
        if i not in known:
            raise GraphError(f"The graph's inputs or outputs name tensor {i}, which no op produces.")


def _check_tensors(graph: Graph) -> None:
    num_tensors = len(graph.tensors)
    for i, tensor in enumerate(graph.tensors):
        if tensor.dtype not in DTYPE_BYTES:
            raise GraphError(
                f"Tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}; known are {', '.join(DTYPE_BYTES)}."
            )
        if not 0 <= tensor.storage < num_tensors or graph.tensors[tensor.storage].storage != tensor.storage:
            raise GraphError(
                f"Tensor {tensor.name!r} (id {i}) names storage {tensor.storage}, which is not its own storage."
            )


def check_amounts(graph: Graph, batch_size: int) -> None:
    """Bound the bytes of the tensors and the FLOPs of batches of up to ``batch_size`` samples.

    A dimension of 0 does not hide the sizes of the others.
    """
    num_bytes = 0
    for tensor in graph.tensors:
        num_bytes += math.prod((max(extent.most(batch_size), 1) for extent in tensor.shape), start=8)
        if num_bytes > MAX_GRAPH_BYTES:
            raise GraphError(
                f"Graph {graph.name!r} needs more than {format_bytes(MAX_GRAPH_BYTES)} for a batch of "
                f"{batch_size}, up to tensor {tensor.name!r}. Choose smaller microbatches; if they are small "
                "already, the file is damaged: capture the model again."
            )
    num_flops = sum(op.flops.most(batch_size) + op.backward_flops.most(batch_size) for op in graph.ops)
    if num_flops > MAX_GRAPH_FLOPS:
        raise GraphError(
            f"Graph {graph.name!r} has more than {MAX_GRAPH_FLOPS:.1e} FLOPs for a batch of {batch_size}. "
            "Choose smaller microbatches; if they are small already, the file is damaged: capture the model again."
        )


def _check_ops(graph: Graph) -> set[int]:
    """Check the order of the ops; return the ids of all tensors that have a value at the end."""
    num_tensors = len(graph.tensors)
    known = {i for i, tensor in enumerate(graph.tensors) if tensor.role in ("input", "parameter", "buffer", "constant")}
    for op in graph.ops:
        for i in (*op.inputs, *op.outputs, *op.saved):
            if not 0 <= i < num_tensors:
                raise GraphError(f"Op {op.name!r} refers to tensor {i}, but the graph has {num_tensors} tensors.")
        unknown = [i for i in op.inputs if i not in known]
        if unknown:
            names = ", ".join(graph.tensors[i].name for i in unknown)
            raise GraphError(
                f"Op {op.name!r} reads {names} before any op has produced it; ops must be in topological order."
            )
        again = [i for i in op.outputs if i in known]
        if again:
            names = ", ".join(graph.tensors[i].name for i in again)
            raise GraphError(
                f"Op {op.name!r} writes {names}, which has a value already; an op that changes a tensor in place "
                "makes a new tensor of the same storage."
            )
        known.update(op.outputs)
    return known


def _check_layers(graph: Graph) -> None:
    position, num_ops = 0, len(graph.ops)
    for layer in graph.layers:
        if layer.start != position or layer.stop <= layer.start:
            raise GraphError(
                f"Layer {layer.name!r} covers ops {layer.start}:{layer.stop}; "
                f"expected it to start at {position} and not be empty."
            )
        position = layer.stop
    if position != num_ops:
        raise GraphError(f"The layers cover {position} of {num_ops} ops; every op belongs to exactly one layer.")


def _check_collectives(graph: Graph) -> None:
    for item in graph.collectives:
        known = 0 <= item.at < len(graph.ops) and 0 <= item.tensor < len(graph.tensors)
        if not known or item.copies < 1 or item.count < 1:
            raise GraphError(
                f"A collective {item.kind} of {item.copies} times tensor {item.tensor} at op {item.at}, {item.count} "
                f"times: the graph has {len(graph.ops)} ops and {len(graph.tensors)} tensors, and copies and count are "
                "at least 1. Shard the graph again."
            )
