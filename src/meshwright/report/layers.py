"""Parameters, FLOPs and bytes of each layer of a graph. Rows for `graph_table` and ``--json``.

Everything is counted once, where it occurs first, so that columns add up to the model: a tied parameter belongs to the
first layer that reads it, a storage kept for the backward to the first layer that saves it. The bytes that cross the
end of a layer are those that a cut there would send per microbatch of that size, except the state of random
generators.
"""

from __future__ import annotations

import itertools
from typing import Any

from meshwright.spec import Graph, Layer

Row = dict[str, Any]


def graph_rows(graph: Graph, batch_size: int, float_bytes: int | None = None) -> list[Row]:
    """One row per layer for batches of ``batch_size`` samples, floating elements being ``float_bytes`` wide if given.

    Keys: ``layer``, ``num_ops``, ``num_parameters``, ``forward_flops``, ``backward_flops``, ``saved_bytes``,
    ``crossing_bytes``. Raises GraphError if the graph is not valid for this batch size.
    """
    graph.check_batch_size(batch_size)
    crossing = crossing_bytes(graph, batch_size)
    counted: set[int] = set()
    saved: set[int] = set()
    return [
        _layer_row(graph, layer, batch_size, float_bytes, counted, saved) | {"crossing_bytes": num_bytes}
        for layer, num_bytes in zip(graph.layers, crossing, strict=True)
    ]


def graph_total(graph: Graph, batch_size: int, float_bytes: int | None = None) -> Row:
    """The whole graph with the keys of `graph_rows`; parameters that no op reads are counted too."""
    graph.check_batch_size(batch_size)
    return {
        "layer": "total",
        "num_ops": len(graph.ops),
        "num_parameters": graph.num_parameters(),
        "forward_flops": sum(op.flops.at(batch_size) for op in graph.ops),
        "backward_flops": sum(op.backward_flops.at(batch_size) for op in graph.ops),
        "saved_bytes": graph.saved_bytes(graph.ops, batch_size, float_bytes=float_bytes),
        "crossing_bytes": None,
    }


def crossing_bytes(graph: Graph, batch_size: int) -> list[int]:
    """Bytes of activations that later layers need from before each layer's end, shape (num_layers,); the last is 0.

    Values that later stages recompute (`Op.replicable`) do not cross.
    """
    layer_of = [layer for layer, item in enumerate(graph.layers) for _ in range(item.start, item.stop)]
    made: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for op, layer in zip(graph.ops, layer_of, strict=True):
        if op.replicable:
            continue
        last_use.update((tensor, layer) for tensor in op.inputs if tensor in made)
        made.update((tensor, layer) for tensor in op.outputs)
    last_use.update((tensor, len(graph.layers) - 1) for tensor in graph.outputs if tensor in made)
    steps = [0] * (len(graph.layers) + 1)
    for tensor, layer in last_use.items():
        num_bytes = graph.tensors[tensor].num_bytes(batch_size)
        steps[made[tensor]] += num_bytes
        steps[layer] -= num_bytes
    return list(itertools.accumulate(steps[:-1]))


def _layer_row(
    graph: Graph, layer: Layer, batch_size: int, float_bytes: int | None, counted: set[int], saved: set[int]
) -> Row:
    """The part of one layer; adds what it counts to ``counted`` (parameters) and ``saved`` (storages)."""
    ops = graph.ops[layer.start : layer.stop]
    parameters = {i for op in ops for i in op.inputs if graph.tensors[i].role == "parameter"} - counted
    counted |= parameters
    storages = {graph.tensors[i].storage for op in ops for i in op.saved}
    known = frozenset(storages & saved)
    saved |= storages
    return {
        "layer": layer.name,
        "num_ops": len(ops),
        "num_parameters": sum(graph.tensors[i].num_elements(0) for i in parameters),
        "forward_flops": sum(op.flops.at(batch_size) for op in ops),
        "backward_flops": sum(op.backward_flops.at(batch_size) for op in ops),
        "saved_bytes": graph.saved_bytes(ops, batch_size, exclude=known, float_bytes=float_bytes),
    }
