"""The local graph of one rank and its collectives: the result of `shard_graph`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.spec import Graph
    from meshwright.spec.exchange import Axis, Collective
    from meshwright.spec.sharding import Layout

# Prefix of the kinds of ops that `shard_graph` adds, as in ``mesh.all_gather``.
MESH = "mesh."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGraph:
    """A graph under a sharding.

    ``graph`` is what one rank computes, the first rank of each axis if parts are uneven: the tensors of the whole graph
    under their ids with local shapes, then those that conversions make; its ops in the same order, with local FLOPs,
    and the conversions among them as ops of kind ``mesh.*``; the same layers. ``layouts`` has, per axis of a size above
    1, the layout of each tensor on that axis. ``reduced_parameters``: per axis, the parameters whose gradients are
    partial on each rank; they are summed once per step before the optimizer. On the expert axis, whose ranks are
    replicas of each other, these are all parameters that are not split over it (`layouts`). ``own_rows``: tensors of
    sorted choices (`expert_ops`), whose order is each rank's own.
    """

    graph: Graph
    layouts: Mapping[Axis, tuple[Layout, ...]]
    collectives: tuple[Collective, ...]
    reduced_parameters: Mapping[Axis, tuple[int, ...]]
    own_rows: frozenset[int] = frozenset()
