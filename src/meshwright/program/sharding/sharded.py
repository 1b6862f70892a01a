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

    ``graph`` is what one rank computes; if parts are uneven, the first rank of each axis. It has the tensors of the
    whole graph under the same ids, with local shapes, and after them the tensors that conversions make. It has the same
    ops in the same order, with local FLOPs, and among them the conversions as ops of kind ``mesh.*``; its layers are
    the same. ``layouts`` has, for each axis of a size above 1, the layout of each tensor on that axis.
    ``reduced_parameters``: for each axis, the parameters whose gradients are partial on each rank; they are summed once
    per step before the optimizer. On the expert axis, whose ranks are replicas of each other, these are all parameters
    that are not split over the axis. ``own_rows``: ids of the tensors of sorted choices (`expert_ops`), whose rows are
    in a different order on each rank.
    """

    graph: Graph
    layouts: Mapping[Axis, tuple[Layout, ...]]
    collectives: tuple[Collective, ...]
    reduced_parameters: Mapping[Axis, tuple[int, ...]]
    own_rows: frozenset[int] = frozenset()
