"""Sharding: a graph and a `Sharding` → the local graph of one rank and the collectives between the ranks."""

from meshwright.program.sharding.sharded import MESH, ShardedGraph

__all__ = ["MESH", "ShardedGraph"]
