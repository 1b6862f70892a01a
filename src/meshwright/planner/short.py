"""A graph with its runs of equal layers shortened: what holds of one block holds of all of them.

Of n equal layers in a row three stay: the first, one between equal neighbours, and the last. What follows the run reads
from the last one that stayed what it read from the last one there was. So a graph of 128 blocks is split, estimated and
weighed as one of three, and `spread` gives every layer of the long graph its figures.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Graph
from meshwright.spec.graph import Layer, Op, Tensor

_KEPT = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShortGraph:
    """``stands_for`` has, for each layer of the long graph, the layer of the short one that is its like, shape (L,)."""

    graph: Graph
    stands_for: NDArray[np.int64]

    def spread(self, figures: NDArray[np.float64]) -> NDArray[np.float64]:
        """Figures of the short graph's layers (the last axis), for all layers of the long one."""
        return figures[..., self.stands_for]


def shorten(graph: Graph) -> ShortGraph:
    """The graph with all runs shortened that can be; itself where there are none.

    A run stays as it is where a value leaves it from another layer than its last, as skips do.
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
    """Ranges of more equal layers in a row than stay."""
    start = 0
    for work, layers in groupby(graph.layers, key=lambda layer: _work_of(graph, layer)):
        count = len(list(layers))
        if work is not None and count > _KEPT:
            yield start, start + count
        start += count


def _work_of(graph: Graph, layer: Layer) -> Hashable:
    """What a layer computes, equal for layers that are alike in all that is estimated; None for one on its own."""
    if not layer.block:
        return None
    return layer.block, tuple(
        (op.kind, op.attributes, op.flops, op.backward_flops, _values(graph, op.inputs), _values(graph, op.outputs))
        for op in graph.ops[layer.start : layer.stop]
    )


def _values(graph: Graph, ids: tuple[int, ...]) -> Hashable:
    """What of some values a cost depends on."""
    known = (graph.tensors[i] for i in ids)
    return tuple((item.shape, item.dtype, item.requires_grad, item.role) for item in known)


@lru_cache(maxsize=64)
def is_plain_chain(graph: Graph) -> bool:
    """Whether every layer reads what the one before it made, so that a value goes through all of them in order."""
    home: dict[int, int] = {}
    linked = [False] * len(graph.layers)
    for index, layer in enumerate(graph.layers):
        for op in graph.ops[layer.start : layer.stop]:
            linked[index] |= any(home.get(i) == index - 1 for i in op.inputs)
            home.update(dict.fromkeys(op.outputs, index))
    return all(linked[1:])


def _is_chain(graph: Graph, start: int, stop: int) -> bool:
    """Whether each layer of a run reads, of the run, only what the layer before it made, and what follows, its last."""
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
    """The graph of these layers. The last one of a run reads what the last one that stayed before it made."""
    renamed: dict[int, int] = {}
    for start, stop in runs:
        # What the layer before the last made is, in the short graph, what the second made.
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
    """The values that two equal layers make, in pairs."""
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
