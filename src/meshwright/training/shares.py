"""Ops of the share that one device has of a plan's graph, timed without the devices that it exchanges values with.

What an op of a local graph does with values of other ranks is a copy here: what a rank gathers is its own part as often
as there are ranks, of a sum it keeps its own part. What ranks send each other is timed apart (`measurement.links`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.capture import rebuild
from meshwright.measurement import OpSource
from meshwright.program.sharding import MESH
from meshwright.spec import Graph


def share_source(graph: Graph, batch_size: int) -> OpSource:
    """What `measurement` times of a local graph; inputs that are indices are 0 or 1.

    Raises GraphError for a graph with an op that cannot be called by what the graph says of it.
    """
    graph.check_batch_size(batch_size)

    def batch(count: int) -> Sequence[torch.Tensor]:
        return [_example(graph, tensor, count) for tensor in graph.inputs]

    return OpSource(
        graph=graph,
        cut=lambda feeds, fetches, ops, size: rebuild(
            graph, feeds, fetches, ops, batch_size=size, converters=STAND_INS
        ),
        batch=batch,
    )


def _example(graph: Graph, tensor: int, batch_size: int) -> torch.Tensor:
    shape = [extent.at(batch_size) for extent in graph.tensors[tensor].shape]
    dtype = getattr(torch, graph.tensors[tensor].dtype)
    return torch.rand(shape, dtype=dtype) if dtype.is_floating_point else torch.randint(2, shape).to(dtype)


def _resized(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A copy with every dim cut to, or filled up with repetitions to, its size."""
    for dim, size in enumerate(shape):
        if value.shape[dim] < size:
            times = -(-size // value.shape[dim])
            value = torch.cat([value] * times, dim)
        value = value.narrow(dim, 0, size)
    return value.clone() if value.is_contiguous() else value.contiguous()


def _viewed(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The value itself, or a part of it."""
    for dim, size in enumerate(shape):
        value = value.narrow(dim, 0, size)
    return value.view_as(value)


STAND_INS = {
    f"{MESH}{name}.default": stand_in
    for stand_in, names in (
        (_resized, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
        (_viewed, ("copy", "shard", "ring")),
    )
    for name in names
}
