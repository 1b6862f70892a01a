"""Time the ops of one device's shard of a plan's graph, without the devices with which it communicates.

An op of a local graph that uses values of other ranks is a copy here. A gathered tensor is the rank's own part, once
per rank; a scattered sum is the rank's own part. A rank receives the same number of rows for its experts as it sends,
the same number for each. Transfers between ranks are timed separately (`measurement.links`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from meshwright.capture import Captured, has_own_graph, own_graph, rebuild
from meshwright.measurement import OpSource
from meshwright.program.sharding import MESH
from meshwright.runtime.teams.team_operators import ARRANGING, COMBINE, COUNTING, DISPATCH
from meshwright.spec import Graph


def share_source(graph: Graph, batch_size: int, captured: Captured | None = None) -> OpSource:
    """The input of `measurement` for a local graph; inputs that are indices are 0 or 1.

    ``captured``: the model of the graph, for ops that contain a graph.

    Raises GraphError for an op that cannot be called with the graph's information alone.
    """
    graph.check_batch_size(batch_size)

    def batch(count: int) -> Sequence[torch.Tensor]:
        return [_example(graph, tensor, count) for tensor in graph.inputs]

    own = (
        {}
        if captured is None
        else {
            index: own_graph(captured, op, batch_size=batch_size)
            for index, op in enumerate(graph.ops)
            if has_own_graph(graph, op)
        }
    )
    return OpSource(
        graph=graph,
        cut=lambda feeds, fetches, ops, size: rebuild(
            graph, feeds, fetches, ops, batch_size=size, converters=STAND_INS, modules=own
        ),
        batch=batch,
    )


def _example(graph: Graph, tensor: int, batch_size: int) -> torch.Tensor:
    shape = [extent.at(batch_size) for extent in graph.tensors[tensor].shape]
    dtype = getattr(torch, graph.tensors[tensor].dtype)
    return torch.rand(shape, dtype=dtype) if dtype.is_floating_point else torch.randint(2, shape).to(dtype)


def _resized(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A copy with every dim cut, or extended by repetition, to its size."""
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


def _even_counts(ends: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Row counts with the given total, equal for each expert and from each rank."""
    count, total = shape[0] * shape[1], int(ends[-1])
    counts = torch.full((count,), total // count, dtype=torch.int64)
    counts[: total % count] += 1
    return counts.view(shape)


def _arranged(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda received, _: function(received)


STAND_INS = {
    COUNTING: _even_counts,
    DISPATCH: _resized,
    COMBINE: _resized,
    **{kind: _arranged(function) for kind, function in ARRANGING.items()},
    **{
        f"{MESH}{name}.default": stand_in
        for stand_in, names in (
            (_resized, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
            (_viewed, ("copy", "shard", "ring")),
        )
        for name in names
    },
}
