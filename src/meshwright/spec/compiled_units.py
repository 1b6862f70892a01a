"""Compiled units: ranges of ops that torch compiles together, each a layer, a part of a layer, or a few small layers.

A unit has one backward, at whose end the gradients of all its parameters become available. With one unit for a whole
stage, no gradient synchronisation could overlap with the backward. Layers are the natural units: ZeRO 2 and 3 gather
and free parameters layer by layer (`program.sharding.zero`), and equal layers share one compilation.

Layers are cut into parts if a stage with replicas has few layers, because the gradients of the last unit are summed
after the backward has ended. Small neighbouring layers are joined, because an element of an ``nn.Sequential`` has an op
or two, and fusion needs more. A joined unit has few ops and few of the weights. Under ZeRO 2 and 3 layers are neither
cut nor joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.graph import Graph
    from meshwright.spec.plan import Plan
    from meshwright.spec.recompute import Ranges

# Units of a stage whose gradients are summed in buckets: the last of 8 equal ones leaves an eighth of the sums exposed.
_LEAST_UNITS = 8
# One or two products in each part of a block.
_MOST_PARTS = 4
# Ops of a unit of joined layers: a convolution, its norm and what follows, a few times. Blocks have more.
_FEW_OPS = 12
# Layers are the units.
AS_LAYERS = -1


def parts_of_layers(plan: Plan) -> int:
    """Return the number of parts into which each layer of a plan is cut for compilation; 1: layers are not cut.

    Returns `AS_LAYERS` (-1) under ZeRO 2 and 3, where each layer is one unit, and 0 if the plan is not compiled.
    """
    if not plan.compiled:
        return 0
    if plan.exchange.zero >= 2:
        return AS_LAYERS
    counts = [stage.stop - stage.start for stage in plan.stages if len(stage.ranks) > 1]
    return min(-(-_LEAST_UNITS // min(counts)), _MOST_PARTS) if counts else 1


@lru_cache(maxsize=64)
def compiled_units(graph: Graph) -> Ranges:
    """Return the compiled units: ranges of ops ``start:stop``, ascending and disjoint; empty without compilation.

    A recomputed range is a unit by itself. If it reads buffers, which a recompute must not change, it is not compiled.
    Ops with a collective inside a stage (`Graph.collectives`) are in no unit.
    """
    if not graph.compiled:
        return ()
    left_out = {item.at for item in graph.collectives if item.phase != "step"}
    edges = {edge for layer in graph.layers for edge in (layer.start, layer.stop)} - _joints(graph)
    edges |= {cut for layer in graph.layers for cut in _cuts(graph, layer.start, layer.stop)}
    edges |= {edge for op in left_out for edge in (op, op + 1)}
    for start, stop in graph.recompute:
        edges = {edge for edge in edges if not start < edge < stop or edge in left_out or edge - 1 in left_out}
        edges |= {start, stop}
        read = {graph.tensors[i].role for op in graph.ops[start:stop] for i in op.inputs}
        if not read.isdisjoint(("buffer", "constant")):
            left_out |= {edge for edge in edges if start <= edge < stop}
    return tuple((start, stop) for start, stop in pairwise(sorted(edges)) if start not in left_out)


@lru_cache(maxsize=64)
def unit_starts(graph: Graph) -> tuple[int, ...]:
    """Return, for every op, the first op of its compiled unit; for an op outside all units, the op itself."""
    starts = list(range(len(graph.ops)))
    for start, stop in compiled_units(graph):
        starts[start:stop] = [start] * (stop - start)
    return tuple(starts)


def _joints(graph: Graph) -> set[int]:
    """Boundaries between layers that are compiled together."""
    if graph.compiled == AS_LAYERS:
        return set()
    most = sum(_weights(graph, op) for op in range(len(graph.ops))) / _LEAST_UNITS
    found: set[int] = set()
    num_ops = weights = 0
    for layer in graph.layers:
        own = sum(_weights(graph, op) for op in range(layer.start, layer.stop))
        size = layer.stop - layer.start
        if num_ops and num_ops + size <= _FEW_OPS and (not own or weights + own <= most):
            found.add(layer.start)
            num_ops, weights = num_ops + size, weights + own
        else:
            num_ops, weights = size, own
    return found


def _weights(graph: Graph, op: int) -> int:
    """Elements of the trained parameters that an op reads."""
    read = [graph.tensors[i] for i in dict.fromkeys(graph.ops[op].inputs)]
    return sum(tensor.num_elements(1) for tensor in read if tensor.role == "parameter" and tensor.requires_grad)


def _cuts(graph: Graph, start: int, stop: int) -> Iterator[int]:
    """Where a layer is cut into parts of about equal weights, with the fewest elements passed between them."""
    count = graph.compiled
    if count < 2:
        return
    weights = [_weights(graph, op) for op in range(start, stop)]
    total, before = sum(weights), 0
    shares = [(before := before + weight) / total for weight in weights[:-1]] if total else []
    for part in range(1, count):
        close = [
            start + place + 1
            for place, share in enumerate(shares)
            if abs(share - part / count) < 0.5 / count and _is_legal_cut(graph, start, start + place + 1, stop)
        ]
        if close:
            # The last of equal places: views and sums stay with the ops that they follow.
            yield min(reversed(close), key=lambda cut: _handed_on(graph, start, cut, stop))


def _handed_on(graph: Graph, start: int, cut: int, stop: int) -> int:
    """Elements that are made in a layer before a cut, or read on both sides, and read after it."""
    behind = {graph.tensors[i].storage for op in graph.ops[cut:stop] for i in op.inputs}
    behind |= {graph.tensors[i].storage for i in graph.outputs}
    known = {graph.tensors[i].storage for op in graph.ops[start:cut] for i in (*op.inputs, *op.outputs)}
    return sum(graph.tensors[i].num_elements(1) for i in behind & known if graph.tensors[i].role == "activation")


def _is_legal_cut(graph: Graph, start: int, cut: int, stop: int) -> bool:
    """Whether no value made before a cut is written after it."""
    made = {graph.tensors[i].storage for op in graph.ops[start:cut] for i in op.outputs}
    written = {graph.tensors[op.inputs[0]].storage for op in graph.ops[cut:stop] if op.inputs and op.is_in_place}
    return made.isdisjoint(written)
