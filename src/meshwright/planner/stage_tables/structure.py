"""The contents of every possible stage i:j of a graph (`find_structure`), and sums over all stages (`Rectangles`).

Stage i:j has the layers i to j - 1. The contents do not depend on the batch size. The rules are those of `spec.slices`
and `cost.memory`, evaluated for all stages together. A stage needs what its layers need, except what it produces
itself. So it is enough to look at the slices of single layers:

    ops, parameters, buffers, inputs    held if any layer of the stage needs them
    received                            produced before i, needed by a layer of the stage
    saved (by storage)                  kept by an op of the stage, or read by a recomputed part, and not of a
                                        received tensor's or input's storage
    sent (by storage)                   produced in the stage, needed from j on, neither saved nor received
    crossing[i]                         produced before i, needed from i on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.memory import kept_results
from meshwright.spec import Graph, read_from_outside, slice_graph
from meshwright.spec.recompute import kept_within
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Integers = NDArray[np.int64]


# An item (an op, a parameter, a saved tensor) belongs to the stages i:j of a few rectangles i0 <= i < i1, j0 <= j < j1
# of the (i, j) plane. The weight of all items of every stage is then a two-dimensional prefix sum over the corners of
# the rectangles: O(items + L²) for a graph of L layers.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rectangles:
    """In which stages i:j items (ops or tensors) occur, as rectangles i0 <= i < i1, j0 <= j < j1.

    ``rows`` (R, 5) has the columns item, i0, i1, j0, j1.
    """

    num_layers: int
    rows: Integers

    def table(self, weights: Integers) -> Integers:
        """Return the total weight of the items of every stage i:j, shape (L, L + 1).

        ``weights`` has one whole number per item, such as its bytes.
        """
        edges = np.zeros((self.num_layers + 1, self.num_layers + 2), np.int64)
        item, i0, i1, j0, j1 = self.rows.T
        weight = weights[item]
        for i, j, sign in ((i0, j0, 1), (i1, j0, -1), (i0, j1, -1), (i1, j1, 1)):
            np.add.at(edges, (i, j), sign * weight)
        return edges.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]


def rectangles(num_layers: int, rows: Iterable[tuple[int, int, int, int, int]]) -> Rectangles:
    """Return the `Rectangles` of rows (item, i0, i1, j0, j1)."""
    return Rectangles(num_layers=num_layers, rows=np.array(list(rows), np.int64).reshape(-1, 5))


def users(num_layers: int, layers_of: Iterable[Iterable[int]]) -> Rectangles:
    """Return the rectangles of items that a stage holds, once, if it has at least one of the item's layers.

    Entry k of ``layers_of`` lists the layers of item k.
    """
    return rectangles(
        num_layers, (row for item, layers in enumerate(layers_of) for row in _covers(num_layers, item, layers))
    )


def _covers(num_layers: int, item: int, layers: Iterable[int]) -> Iterable[tuple[int, int, int, int, int]]:
    """The first layer of the item at or after i is p for i in (previous, p]; the stage reaches it for j > p."""
    previous = -1
    for layer in sorted(set(layers)):
        yield item, previous + 1, layer + 1, layer + 1, num_layers + 1
        previous = layer


_STATE_ROLES = ("parameter", "buffer", "constant")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Structure:
    """The contents of every possible stage i:j of a graph.

    Each field of type `Rectangles` lists for each item the ranges of i and j for which stage i:j has it; items of
    ``ops`` are ops, items of the others tensor ids. ``received``: made before layer i and read in the stage.
    ``saved``: kept for the backward. ``sent``: made in the stage and read from layer j on. ``crossing[i]``: the tensors
    made before layer i and read from it on. ``random``: the layers that draw random numbers.
    """

    num_layers: int
    ops: Rectangles
    parameters: Rectangles
    buffers: Rectangles
    inputs: Rectangles
    received: Rectangles
    saved: Rectangles
    sent: Rectangles
    crossing: tuple[tuple[int, ...], ...]
    random: tuple[int, ...]

    def op_picoseconds(self, seconds: NDArray[np.float64]) -> Integers:
        """Return the picoseconds of all ops of every stage i:j, shape (L, L + 1), from ``seconds`` of each op, (ops,).

        They are whole numbers, so that stages of equal layers take exactly the same time.
        """
        return self.ops.table(np.rint(seconds * PICOSECONDS_PER_SECOND).astype(np.int64))


def find_structure(graph: Graph) -> Structure:
    """Return the contents of all stages of a graph, in O(ops + layers · crossing tensors)."""
    num_layers = len(graph.layers)
    slices = slice_graph(graph, [(layer, layer + 1) for layer in range(num_layers)])
    needs = _Needs(num_layers)
    again = {op for start, stop in graph.recompute for op in range(start, stop)}
    for layer in slices:
        for op in layer.ops:
            needs.ops[op].append(layer.index)
            for tensor in graph.ops[op].saved if graph.mode == "training" and op not in again else ():
                needs.savers[graph.tensors[tensor].storage].append(layer.index)
        for start, stop in graph.recompute:
            if start in layer.ops:
                results = (kept_results(graph, op) for op in kept_within(graph, start, stop))
                for storage in read_from_outside(graph, start, stop).union(*results):
                    needs.savers[storage].append(layer.index)
        for tensor in layer.parameters:
            needs.parameters[tensor].append(layer.index)
        for tensor in layer.buffers:
            needs.buffers[tensor].append(layer.index)
        for tensor in layer.inputs:
            needs.inputs[tensor].append(layer.index)
        for channel in layer.incoming:
            for tensor in channel.tensors:
                needs.received[tensor].append(layer.index)
                needs.source[tensor] = channel.source
    kept, sent = _kept_and_sent(graph, needs)
    return Structure(
        num_layers=num_layers,
        ops=users(num_layers, _by_id(needs.ops, len(graph.ops))),
        parameters=users(num_layers, _by_id(needs.parameters, len(graph.tensors))),
        buffers=users(num_layers, _by_id(needs.buffers, len(graph.tensors))),
        inputs=users(num_layers, _by_id(needs.inputs, len(graph.tensors))),
        received=rectangles(num_layers, _received(needs)),
        saved=rectangles(num_layers, kept),
        sent=rectangles(num_layers, sent),
        crossing=tuple(
            tuple(sorted(v for v, layers in needs.received.items() if needs.source[v] < i <= max(layers)))
            for i in range(num_layers)
        ),
        random=tuple(layer.index for layer in slices if layer.draws_random),
    )


class _Needs:
    """For each op or tensor, the layers that need it."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.ops: dict[int, list[int]] = defaultdict(list)
        self.parameters: dict[int, list[int]] = defaultdict(list)
        self.buffers: dict[int, list[int]] = defaultdict(list)
        self.inputs: dict[int, list[int]] = defaultdict(list)
        self.received: dict[int, list[int]] = defaultdict(list)
        self.source: dict[int, int] = {}
        self.savers: dict[int, list[int]] = defaultdict(list)

    def first_from(self, layers: Iterable[int]) -> Integers:
        """Return, for each i, the first of the given layers at or after i, shape (L,); L + 1 if no layer follows."""
        known = np.array(sorted(set(layers)), np.int64)
        place = np.searchsorted(known, np.arange(self.num_layers))
        return np.append(known, self.num_layers + 1)[place]


def _by_id(layers_of: dict[int, list[int]], count: int) -> Iterator[list[int]]:
    return (layers_of.get(item, []) for item in range(count))


_Row = tuple[int, int, int, int, int]


def _received(needs: _Needs) -> Iterator[_Row]:
    """Yield rows: tensor v is received by i:j if i > source(v) and the first layer from i that needs it is before j."""
    for tensor, layers in needs.received.items():
        previous = needs.source[tensor]
        for layer in sorted(set(layers)):
            yield tensor, previous + 1, layer + 1, layer + 1, needs.num_layers + 1
            previous = layer


def _kept_and_sent(graph: Graph, needs: _Needs) -> tuple[list[_Row], list[_Row]]:
    """Return rectangles of saved and of sent storages. Only storages that cross boundaries need every i checked."""
    members: dict[int, list[int]] = defaultdict(list)
    for tensor in sorted({*needs.received, *needs.inputs, *graph.outputs}):
        members[graph.tensors[tensor].storage].append(tensor)
    kept: list[_Row] = []
    sent: list[_Row] = []
    for storage in sorted({*needs.savers, *members}):
        if graph.tensors[storage].role in _STATE_ROLES:
            continue
        if storage in members:
            _look_at_every_start(graph, needs, storage, members[storage], kept, sent)
        else:
            previous = -1
            for layer in sorted(set(needs.savers[storage])):
                kept.append((storage, previous + 1, layer + 1, layer + 1, needs.num_layers + 1))
                previous = layer
    return kept, sent


def _look_at_every_start(
    graph: Graph, needs: _Needs, storage: int, tensors: list[int], kept: list[_Row], sent: list[_Row]
) -> None:
    num_layers = needs.num_layers
    never = num_layers + 1
    saved_from = needs.first_from(needs.savers.get(storage, ())).tolist()
    # From this layer on, the stage gets the storage from elsewhere: received, or an input that it reads itself.
    elsewhere_from = [never] * num_layers
    spans = []
    for tensor in tensors:
        first = needs.first_from([*needs.received.get(tensor, ()), *needs.inputs.get(tensor, ())]).tolist()
        source = needs.source.get(tensor, -1)
        for i in range(num_layers):
            if i > source or graph.tensors[tensor].role == "input":
                elsewhere_from[i] = min(elsewhere_from[i], first[i])
        if tensor in needs.received:
            spans.append((source, max(needs.received[tensor])))
        if tensor in graph.outputs and graph.tensors[tensor].role not in ("input", *_STATE_ROLES):
            spans.append((needs.source.get(tensor, _producer_layer(graph, tensor)), num_layers))
    for i in range(num_layers):
        if saved_from[i] < never and elsewhere_from[i] > saved_from[i]:
            kept.append((storage, i, i + 1, saved_from[i] + 1, min(elsewhere_from[i], num_layers) + 1))
        limit = min(saved_from[i], elsewhere_from[i], num_layers)
        reached = i
        for source, last in sorted(span for span in spans if span[0] >= i):
            start, stop = max(source, reached), min(last, limit)
            if start < stop:
                sent.append((storage, i, i + 1, start + 1, stop + 1))
                reached = stop


def _producer_layer(graph: Graph, tensor: int) -> int:
    """Return the layer whose stage yields an output: its producer's, or the last one if any stage can compute it."""
    op = next(index for index, item in enumerate(graph.ops) if tensor in item.outputs)
    if graph.ops[op].replicable:
        return len(graph.layers) - 1
    return next(index for index, layer in enumerate(graph.layers) if layer.start <= op < layer.stop)
