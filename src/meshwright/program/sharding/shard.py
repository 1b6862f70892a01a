"""Shard a graph (`shard_graph`): axis by axis, each localises the local graph of the axis before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.program.sharding.facts import AxisGraph
from meshwright.program.sharding.grouped import misplaced
from meshwright.program.sharding.local import localise
from meshwright.program.sharding.propagate import propagate
from meshwright.program.sharding.rules import is_meant, rule_for
from meshwright.program.sharding.sharded import ShardedGraph
from meshwright.spec.collective import Axis, Collective
from meshwright.spec.errors import PlanError, suggest
from meshwright.spec.graph import Extent, Graph, Op
from meshwright.spec.sharding import Layout, Replicate, Sharding

if TYPE_CHECKING:
    from meshwright.program.sharding.convert import Conversions

# The tensor axis comes last: it may split dims that the others have split before, such as tokens.
_ORDER: tuple[Axis, ...] = ("expert", "context", "tensor")
# Arguments that are numbers to compute with, such as the number of tokens, by which routers' losses are divided.
_VALUES = ("other", "value", "fill_value")
_COUNTS_SAMPLES = re.compile(r"(\d+\*)?b(\+\d+)?")


@lru_cache(maxsize=32)
def shard_graph(graph: Graph, sharding: Sharding) -> ShardedGraph:
    """Return the local graph of one rank under a sharding, with its collectives.

    Raises PlanError for a sharding that an op does not support: heads, tokens or experts that do not divide, a
    placement along a dim that cannot be split, an axis for which the graph has nothing to split.
    """
    if any(op.phase == "backward" for op in graph.ops):
        raise PlanError(
            f"Graph {graph.name!r} holds its own backward, whose ops cannot be split; give the graph of the model "
            "alone."
        )
    for placement in sharding.placements:
        if not any(is_meant(placement, op) for op in graph.ops):
            known = {name for op in graph.ops for name in (op.module, op.name) if name}
            raise PlanError(
                f"A placement is given for {placement.op!r}, but graph {graph.name!r} has no op of that name or in a "
                f"module of that name{suggest(placement.op, known)}. Correct it, or leave it out."
            )
    sharded = ShardedGraph(graph=graph, layouts={}, collectives=(), reduced_parameters={})
    for axis in _ORDER:
        if sharding.size(axis) > 1:
            sharded = _shard_axis(sharded, axis, sharding)
    return sharded


def _shard_axis(sharded: ShardedGraph, axis: Axis, sharding: Sharding) -> ShardedGraph:
    size = sharding.size(axis)
    graph = with_samples(sharded.graph, size) if axis == "expert" else sharded.graph
    facts = AxisGraph(graph, size, own_samples=axis == "expert")
    state = propagate(facts, rule_for(axis, sharding))
    for error in misplaced(graph, facts.mixtures, state.places):
        raise error
    local, made, moved = localise(state, axis, sharding)
    old = range(len(graph.tensors))
    layouts = {name: _extended(given, made.sources, len(local.tensors)) for name, given in sharded.layouts.items()}
    layouts[axis] = tuple(made.layouts[i] if i not in old else made.layout_of(i) for i in range(len(local.tensors)))
    earlier = [replace(collective, at=moved[collective.at]) for collective in sharded.collectives]
    collectives = [*earlier, *_collectives(local, axis, made, moved)]
    parts = list(made.reduced)
    if axis == "expert":
        # Its ranks are replicas of each other: for unsplit parameters each has the gradient of its own samples.
        parts = [i for i in facts.read_parameters if isinstance(layouts[axis][i], Replicate)]
    reduced = {**sharded.reduced_parameters, axis: tuple(parts)}
    return ShardedGraph(
        graph=local,
        layouts=layouts,
        collectives=tuple(sorted(collectives, key=_issued)),
        reduced_parameters=reduced,
        own_rows=sharded.own_rows.union(*(mixture.rows for mixture in facts.mixtures)),
    )


def with_samples(graph: Graph, factor: int) -> Graph:
    """Return the graph for the samples of all ``factor`` ranks of the axis. Raises PlanError for a fixed batch."""
    if graph.batch_size is not None:
        raise PlanError(
            f"Graph {graph.name!r} was captured for batches of {graph.batch_size} samples only, so experts cannot take "
            "the samples of several ranks. Capture it with a symbolic batch, or give expert = 1."
        )

    def scaled(extent: Extent) -> Extent:
        return Extent(extent.fixed, extent.per_sample * factor)

    tensors = tuple(replace(tensor, shape=tuple(map(scaled, tensor.shape))) for tensor in graph.tensors)
    ops = tuple(_with_samples(op, scaled) for op in graph.ops)
    return replace(graph, tensors=tensors, ops=ops)


def _with_samples(op: Op, scaled: Callable[[Extent], Extent]) -> Op:
    """Return the op with the FLOPs of all samples, and with numbers that count them scaled."""
    numbers = tuple(
        (name, str(scaled(Extent.decode_scalar(text))) if name in _VALUES and _COUNTS_SAMPLES.fullmatch(text) else text)
        for name, text in op.attributes
    )
    if numbers == op.attributes and not (op.flops.per_sample or op.backward_flops.per_sample):
        return op
    return replace(op, flops=scaled(op.flops), backward_flops=scaled(op.backward_flops), attributes=numbers)


def _extended(layouts: tuple[Layout, ...], sources: dict[int, int], count: int) -> tuple[Layout, ...]:
    """Return layouts on an earlier axis, with those of new tensors, which have the layouts of their sources."""
    found = list(layouts)
    for new in range(len(layouts), count):
        found.append(found[sources[new]])
    return tuple(found)


def _collectives(local: Graph, axis: Axis, made: Conversions, moved: tuple[int, ...]) -> list[Collective]:
    """Return the collectives of inserted ops and of ops of the whole graph."""
    found = [(moved[index], exchange) for index, exchanges in made.inside.items() for exchange in exchanges]
    for at, op in enumerate(local.ops):
        found += [(at, exchange) for output in op.outputs for exchange in made.exchanges.get(output, ())]
    return [
        Collective(
            kind=exchange.kind,
            axis=axis,
            phase="backward" if exchange.backward else "forward",
            at=at,
            tensor=exchange.tensor,
            copies=exchange.copies,
            count=exchange.count,
        )
        for at, exchange in found
    ]


def _issued(collective: Collective) -> tuple[bool, int]:
    """Return the sort key of a collective in the order of the step: ops ascending, then their backwards descending."""
    backward = collective.phase == "backward"
    return backward, -collective.at if backward else collective.at
