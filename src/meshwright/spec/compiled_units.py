"""Which ops of a graph are compiled together: those of a layer, and never more.

A unit has one backward, so that the gradients of all its parameters come at its end: one unit for a whole stage would
leave no backward beside which the first of them could be exchanged. Layers are also what fully sharded replicas gather
and let go (`program.sharding.zero`), and those that repeat share one compilation.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.graph import Graph
    from meshwright.spec.recompute import Ranges


@lru_cache(maxsize=64)
def compiled_units(graph: Graph) -> Ranges:
    """Ranges of ops ``start:stop``, ascending and apart; none of a graph that is not compiled.

    What is computed again is a unit of its own, unless it reads buffers, which computing again leaves as they are. Ops
    at which ranks of a mesh axis exchange are in none.
    """
    if not graph.compiled:
        return ()
    left_out = {item.at for item in graph.collectives if item.phase != "step"}
    edges = {edge for layer in graph.layers for edge in (layer.start, layer.stop)}
    edges |= {edge for op in left_out for edge in (op, op + 1)}
    for start, stop in graph.recompute:
        edges |= {start, stop}
        read = {graph.tensors[i].role for op in graph.ops[start:stop] for i in op.inputs}
        if not read.isdisjoint(("buffer", "constant")):
            left_out |= {edge for edge in edges if start <= edge < stop}
    return tuple((start, stop) for start, stop in pairwise(sorted(edges)) if start not in left_out)


@lru_cache(maxsize=64)
def unit_starts(graph: Graph) -> tuple[int, ...]:
    """Of every op the first op of its unit; of one in no unit, itself."""
    starts = list(range(len(graph.ops)))
    for start, stop in compiled_units(graph):
        starts[start:stop] = [start] * (stop - start)
    return tuple(starts)
