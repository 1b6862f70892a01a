"""The local graph of one rank and what it exchanges with others: the result of `shard_graph`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.spec.collective import Axis, Collective
    from meshwright.spec.graph import Graph
    from meshwright.spec.sharding import Layout

# Kinds of the ops that `shard_graph` adds begin so: ``mesh.all_gather``.
MESH = "mesh."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGraph:
    """A graph under a sharding.

    ``graph`` is what one rank computes, the first of each axis where parts are uneven: the tensors of the whole graph
    under their ids with local shapes, then those that conversions make; its ops in the same order, with local FLOPs,
    and the conversions among them as ops of kind ``mesh.*``; the same layers. ``layouts`` has, per axis of a size above
    1, how each of its tensors lies on it. ``reduced_parameters``: per axis, the parameters whose gradients each rank
    has in part; they are summed once per step before the optimizer. On the expert axis, whose ranks are replicas to
    each other, all but those that are split over it (`layouts`). ``own_rows``: tensors of sorted choices (`grouped`),
    whose order is each rank's own.
    """

    graph: Graph
    layouts: Mapping[Axis, tuple[Layout, ...]]
    collectives: tuple[Collective, ...]
    reduced_parameters: Mapping[Axis, tuple[int, ...]]
    own_rows: frozenset[int] = frozenset()
