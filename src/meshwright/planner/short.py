"""Shorten the runs of equal layers of a graph, because equal layers have equal costs.

Three of n equal layers in a row are kept: the first, one between equal neighbours, and the last. Layers after the run
read the last kept layer. So a graph of 128 equal blocks is split and estimated as a graph of three blocks;
`ShortGraph.spread` then maps the results to every layer of the whole graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Graph, Layer, Op, Tensor

_KEPT = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShortGraph:
    """A graph in which runs of equal layers are shortened.

    ``stands_for`` (L,) has, for each layer of the whole graph, the index of the equal layer in the short graph.
    """

    graph: Graph
    stands_for: NDArray[np.int64]

    def spread(self, figures: NDArray[np.float64]) -> NDArray[np.float64]:
        """Map values per layer of the short graph (along the last axis) to all layers of the whole graph."""
        return figures[..., self.stands_for]


def shorten(graph: Graph) -> ShortGraph:
    """Return the graph with all possible runs of equal layers shortened; the same graph if there are no such runs.

    A run is kept as it is if layers after the run read outputs of a layer other than its last, as with skip
    connections.
    """
    runs = [run for run in _runs(graph) if _is_chain(graph, *run)]
    dropped = {layer for start, stop in runs for layer in range(start + _KEPT - 1, stop - 1)}
    kept = [layer for layer in range(len(graph.layers)) if layer not in dropped]
    new = {layer: index for index, layer in enumerate(kept)}
    like = {layer: start + 1 for start, stop in runs for layer in range(start + 1, stop - 1)}
    stands_for = np.array([new[like.get(layer, layer)] for layer in range(len(graph.layers))])
    if not dropped:
        return ShortGraph(graph=graph, stands_for=stands_for)
    return ShortGraph(graph=_without(graph, kept, runs), stands_for=stands_for)


def _runs(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield ranges of equal layers in a row that are longer than what stays."""
    start = 0
    for work, layers in groupby(graph.layers, key=lambda layer: _work_of(graph, layer)):
        count = len(list(layers))
        if work is not None and count > _KEPT:
            yield start, start + count
        start += count


def _work_of(graph: Graph, layer: Layer) -> Hashable:
    """Return a key that is equal for layers with equal estimates; None for a layer outside of blocks."""
    if not layer.block:
        return None
    return layer.block, tuple(
        (op.kind, op.attributes, op.flops, op.backward_flops, _values(graph, op.inputs), _values(graph, op.outputs))
        for op in graph.ops[layer.start : layer.stop]
    )


def _values(graph: Graph, ids: tuple[int, ...]) -> Hashable:
    """Return the properties of values that costs depend on."""
    known = (graph.tensors[i] for i in ids)
    return tuple((item.shape, item.dtype, item.requires_grad, item.role) for item in known)


@lru_cache(maxsize=64)
def is_plain_chain(graph: Graph) -> bool:
    """Return whether every layer reads an output of the layer before it, so that no layers can run in parallel."""
    home: dict[int, int] = {}
    linked = [False] * len(graph.layers)
    for index, layer in enumerate(graph.layers):
        for op in graph.ops[layer.start : layer.stop]:
            linked[index] |= any(home.get(i) == index - 1 for i in op.inputs)
            home.update(dict.fromkeys(op.outputs, index))
    return all(linked[1:])


def _is_chain(graph: Graph, start: int, stop: int) -> bool:
    """Return whether a run is a chain: each layer reads only the one before, and later layers only the run's last."""
    home = {}
    for index in range(start, stop):
        for op in graph.ops[graph.layers[index].start : graph.layers[index].stop]:
            home.update(dict.fromkeys(op.outputs, index))
    for index in range(start + 1, len(graph.layers)):
        for op in graph.ops[graph.layers[index].start : graph.layers[index].stop]:
            sources = {home[i] for i in op.inputs if i in home} - {index}
            if not sources <= {min(index, stop) - 1}:
                return False
    return not any(home.get(i, stop - 1) != stop - 1 for i in graph.outputs)


def _without(graph: Graph, kept: list[int], runs: list[tuple[int, int]]) -> Graph:
    """Return the graph of these layers; the last one of a run reads the outputs of the last remaining one before it."""
    renamed: dict[int, int] = {}
    for start, stop in runs:
        # The outputs of the layer before the last are, in the short graph, the outputs of the second.
        renamed.update(_pairs(graph, stop - 2, start + _KEPT - 2))
    ops: list[Op] = []
    layers: list[Layer] = []
    for index in kept:
        layer = graph.layers[index]
        begin = len(ops)
        ops += [_reading(op, renamed) for op in graph.ops[layer.start : layer.stop]]
        layers.append(replace(layer, start=begin, stop=len(ops)))
    used = {i for op in ops for i in (*op.inputs, *op.outputs, *op.saved)} | {*graph.inputs, *graph.outputs}
    used |= {renamed.get(graph.tensors[i].storage, graph.tensors[i].storage) for i in used}
    place = {old: new for new, old in enumerate(sorted(used))}
    tensors = tuple(_stored(graph.tensors[old], renamed, place) for old in sorted(used))
    return Graph(
        name=graph.name,
        tensors=tensors,
        ops=tuple(_numbered(op, place) for op in ops),
        layers=tuple(layers),
        inputs=tuple(place[i] for i in graph.inputs),
        outputs=tuple(place[i] for i in graph.outputs),
        mode=graph.mode,
        has_loss=graph.has_loss,
        batch_size=graph.batch_size,
        compiled=graph.compiled,
    )


def _pairs(graph: Graph, first: int, second: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of the corresponding values that two equal layers make."""
    a, b = graph.layers[first], graph.layers[second]
    for one, other in zip(graph.ops[a.start : a.stop], graph.ops[b.start : b.stop], strict=True):
        yield from zip(one.outputs, other.outputs, strict=True)
        yield from zip(one.saved, other.saved, strict=True)


def _reading(op: Op, renamed: dict[int, int]) -> Op:
    return replace(
        op,
        inputs=tuple(renamed.get(i, i) for i in op.inputs),
        saved=tuple(renamed.get(i, i) for i in op.saved),
    )


def _stored(tensor: Tensor, renamed: dict[int, int], place: dict[int, int]) -> Tensor:
    return replace(tensor, storage=place[renamed.get(tensor.storage, tensor.storage)])


def _numbered(op: Op, place: dict[int, int]) -> Op:
    return replace(
        op,
        inputs=tuple(place[i] for i in op.inputs),
        outputs=tuple(place[i] for i in op.outputs),
        saved=tuple(place[i] for i in op.saved),
    )
