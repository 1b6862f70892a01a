"""What AccPar splits: the ops with weights of a graph as a chain of layers, and a cluster halved again and again.

A layer is an op with a weight of at least two dims, and all ops behind it up to the next such; the graph's order is
taken for a chain, as in the paper. Nodes are halved first, then kinds of devices, then devices. Between halves in
different nodes all their network cards carry, between halves of a node a link for every device of the smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost import CostModel
from meshwright.planner.methods.unequal.accpar import ChainLayer, Half
from meshwright.spec import Cluster, Graph, Op, PlanError


def chain_layers(graph: Graph, batch_size: int, cost: CostModel) -> tuple[ChainLayer, ...]:
    """The layers of a graph for a whole batch, with seconds on each kind of the cost model's cluster.

    Raises PlanError for a graph without weights.
    """
    weighted = [index for index, op in enumerate(graph.ops) if _weight(graph, op) is not None]
    if not weighted:
        raise PlanError(f"Graph {graph.name!r} has no op with a weight to train; AccPar splits such ops.")
    edges = [0, *weighted[1:], len(graph.ops)]
    seconds = []
    for kind in cost.cluster.device_kinds:
        costs = cost.estimate_ops(graph, batch_size, kind)
        each = costs.forward_s + costs.backward_s + costs.accumulate_s
        seconds.append(np.add.reduceat(each, edges[:-1]))
    width = cost.numbers.value_bytes
    return tuple(
        _layer(graph, graph.ops[index], batch_size, width, tuple(float(own[place]) for own in seconds))
        for place, index in enumerate(weighted)
    )


def _layer(graph: Graph, op: Op, batch_size: int, width: int, seconds: tuple[float, ...]) -> ChainLayer:
    weight = _weight(graph, op)
    assert weight is not None
    values = [i for i in op.inputs if graph.tensors[i].role not in ("parameter", "buffer", "constant")]
    before = graph.tensors[values[0]] if values else graph.tensors[op.outputs[0]]
    behind = graph.tensors[op.outputs[0]]
    sizes = [float(tensor.num_bytes(batch_size, width)) for tensor in (before, behind)]
    return ChainLayer(
        name=op.module or op.name,
        weight_bytes=float(graph.tensors[weight].num_bytes(0, width)),
        input_bytes=sizes[0],
        output_bytes=sizes[1],
        input_gradient_bytes=sizes[0] * before.requires_grad,
        output_gradient_bytes=sizes[1] * behind.requires_grad,
        seconds=seconds,
        is_convolution="convolution" in op.kind or "conv" in op.kind,
    )


def _weight(graph: Graph, op: Op) -> int | None:
    """The first trained parameter of at least two dims that an op reads."""
    found = (graph.tensors[i] for i in op.inputs)
    return next(
        (i for i, item in zip(op.inputs, found, strict=True) if item.requires_grad and _is_matrix(graph, i)), None
    )


def _is_matrix(graph: Graph, tensor: int) -> bool:
    return graph.tensors[tensor].role == "parameter" and len(graph.tensors[tensor].shape) >= 2


def halve(cluster: Cluster, ranks: Sequence[int] | None = None) -> Half:
    """The devices of a cluster (or some ranks of it) halved down to single ones."""
    own = list(range(cluster.num_ranks) if ranks is None else ranks)
    names = [kind.name for kind in cluster.device_kinds]
    kinds = tuple(names.index(cluster.device_kind(rank).name) for rank in own)
    if len(own) == 1:
        return Half(kinds=kinds)
    first, second = _two_parts(cluster, own)
    return Half(
        kinds=kinds,
        halves=(halve(cluster, first), halve(cluster, second)),
        bytes_per_s=_between(cluster, first, second),
    )


def _two_parts(cluster: Cluster, ranks: list[int]) -> tuple[list[int], list[int]]:
    for key in (cluster.node_index, lambda rank: cluster.device_kind(rank).name, lambda rank: rank):
        groups = list(dict.fromkeys(map(key, ranks)))
        if len(groups) > 1:
            firsts = set(groups[: (len(groups) + 1) // 2])
            return [rank for rank in ranks if key(rank) in firsts], [rank for rank in ranks if key(rank) not in firsts]
    raise AssertionError("one device has no halves")


def _between(cluster: Cluster, first: list[int], second: list[int]) -> float:
    """Bytes per second between two halves."""
    if cluster.node_index(first[0]) == cluster.node_index(second[0]):
        return cluster.link_between(first[0], second[0]).bandwidth_bytes_per_s * min(len(first), len(second))

    def cards(ranks: list[int]) -> float:
        nodes = {
            node: sum(cluster.node_index(rank) == node for rank in ranks) for node in map(cluster.node_index, ranks)
        }
        facts = [(cluster.nodes[node], count) for node, count in nodes.items()]
        return sum(min(node.num_nics, count) * node.nic.bandwidth_bytes_per_s for node, count in facts)

    return min(cards(first), cards(second))
