"""Shard a graph (`shard_graph`), one mesh axis after the other; `localise` splits the local graph of the last axis."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from meshwright.program.sharding.axis_facts import AxisGraph
from meshwright.program.sharding.convert import Conversions, split_shape
from meshwright.program.sharding.dims import OpSplit, find_label
from meshwright.program.sharding.expert_ops import misplaced
from meshwright.program.sharding.propagate import PropagationState, propagate
from meshwright.program.sharding.sharded import ShardedGraph
from meshwright.program.sharding.sharding_rules import is_meant, rule_for
from meshwright.spec import Extent, Graph, Op, PlanError, Replicate, Sharding, Tensor, suggest
from meshwright.spec.exchange import Axis, Collective
from meshwright.spec.sharding import Layout

Shape = tuple[Extent, ...]


# Tensors keep their ids and get local shapes; ops keep their order and get local FLOPs. Where ops read a tensor in
# another layout, an op of kind ``mesh.*`` comes before the first that reads it so; its output is a new tensor. A sum
# over the ranks is a new tensor, too, from which the op after it makes the old one.
def localise(state: PropagationState, axis: Axis, sharding: Sharding) -> tuple[Graph, Conversions, tuple[int, ...]]:
    """Return the local graph of one rank of an axis, its conversions, and the new index of each op of the whole graph.

    ``state`` gives the split of every op and tensor on the axis.
    """
    graph = state.facts.graph
    tensors = [_local_tensor(state, i) for i in range(len(graph.tensors))]
    for index in range(len(graph.ops)):
        for i in graph.ops[index].saved:
            if graph.tensors[i].role == "saved":
                tensors[i] = _local_saved(state, index, i)
    made = Conversions(state, axis, sharding, tensors)
    moved: list[int] = []
    ops: list[Op] = []
    for index in range(len(graph.ops)):
        ops += made.before.get(index, ())
        moved.append(len(ops))
        ops.append(_local_op(state, index, made, tensors))
        ops += made.behind.get(index, ())
    _share_storages(graph, made)
    starts = [*(moved[layer.start] - len(made.before.get(layer.start, ())) for layer in graph.layers), len(ops)]
    layers = (replace(x, start=a, stop=b) for x, a, b in zip(graph.layers, starts, starts[1:], strict=False))
    local = replace(graph, tensors=tuple(tensors), ops=tuple(ops), layers=tuple(layers))
    return local, made, tuple(moved)


def _share_storages(graph: Graph, made: Conversions) -> None:
    """Make views share the memory of their source, which may be a converted tensor by now."""
    tensors = made.tensors
    for index, op in enumerate(graph.ops):
        for output in op.outputs:
            root = graph.tensors[output].storage
            if root == output:
                continue
            sources = [at for at, i in enumerate(op.inputs) if graph.tensors[i].storage == root]
            if sources:
                storage = tensors[made.read.get((index, sources[0]), op.inputs[sources[0]])].storage
                tensors[output] = replace(tensors[output], storage=storage)


def _local_tensor(state: PropagationState, i: int) -> Tensor:
    tensor = state.facts.graph.tensors[i]
    place = state.places.get(i)
    return replace(tensor, shape=split_shape(tensor.shape, place, state.facts.size)) if place else tensor


def _local_saved(state: PropagationState, index: int, i: int) -> Tensor:
    """Give a value saved for backward the split of the first tensor of its op with matching dims."""
    facts, tensor = state.facts, state.facts.graph.tensors[i]
    op, dims, split = facts.graph.ops[index], facts.dims[index], state.splits[index]
    others = (*zip(op.outputs, dims.outputs, strict=True), *zip(op.inputs, dims.inputs, strict=True))
    placed = [
        (facts.graph.tensors[other].shape, place)
        for other, item in others
        if (place := dims.place_in(item, split)) is not None
    ]
    for is_alike in (_is_alike, _begins_alike, _is_merged):
        for shape, place in placed if tensor.shape else ():
            if is_alike(tensor.shape, shape, place[0]):
                dim = 0 if is_alike is _is_merged else place[0]
                kept = is_alike is _is_merged or (dim < len(tensor.shape) and tensor.shape[dim] == shape[dim])
                return replace(tensor, shape=split_shape(tensor.shape, (dim, place[1]) if kept else None, facts.size))
    return tensor


def _is_alike(saved: Shape, shape: Shape, _: int) -> bool:
    """Whether a saved tensor has the leading dims of another tensor, or size one in place of some: statistics."""
    return len(saved) <= len(shape) and all(a in (b, Extent(1)) for a, b in zip(saved, shape, strict=False))


def _begins_alike(saved: Shape, shape: Shape, dim: int) -> bool:
    """Whether it has the dims up to the split one: attention scores, whose last dim differs."""
    return len(saved) > dim and saved[: dim + 1] == shape[: dim + 1]


def _is_merged(saved: Shape, shape: Shape, dim: int) -> bool:
    """Whether its first dim merges several of another tensor, including the split one: batched products."""
    whole: Extent | None = Extent(1)
    for count, extent in enumerate(shape, 1):
        whole = _times(whole, extent) if whole is not None else None
        if count > max(dim, 1) and saved[0] == whole:
            return True
    return False


def _times(a: Extent, b: Extent) -> Extent | None:
    """Return the product, None if both sizes grow with the batch."""
    if a.per_sample and b.per_sample:
        return None
    return Extent(a.fixed * b.fixed, a.per_sample * b.fixed + a.fixed * b.per_sample)


def _local_op(state: PropagationState, index: int, made: Conversions, tensors: list[Tensor]) -> Op:
    facts, split = state.facts, state.splits[index]
    op = facts.graph.ops[index]
    inputs = tuple(made.read.get((index, at), i) for at, i in enumerate(op.inputs))
    outputs = tuple(made.summed.get(i, i) for i in op.outputs)
    saved = tuple(kept for i in op.saved for kept in made.kept.get((index, i), (i,)))
    changed = replace(op, inputs=inputs, outputs=outputs, saved=saved)
    if split is None:
        return changed
    return replace(
        changed,
        flops=_share(op.flops, state, index, split),
        backward_flops=_share(op.backward_flops, state, index, split),
        attributes=_own_attributes(state, index, tensors),
    )


def _share(flops: Extent, state: PropagationState, index: int, split: OpSplit) -> Extent:
    """Return the FLOPs of the largest part."""
    dims, size = state.facts.dims[index], state.facts.size
    found = next(f for item in (*dims.inputs, *dims.outputs) if (f := find_label(item, split.label)))
    whole, part = found[2], -(-found[2] // size)
    return Extent(-(-flops.fixed * part // whole), -(-flops.per_sample * part // whole))


def _own_attributes(state: PropagationState, index: int, tensors: list[Tensor]) -> tuple[tuple[str, str], ...]:
    op, facts = state.facts.graph.ops[index], state.facts
    rank = len(facts.shapes[op.inputs[0]]) if op.inputs else 0
    return local_attributes(op, rank, facts.graph.tensors[op.outputs[0]].shape, tensors[op.outputs[0]].shape)


def local_attributes(op: Op, rank: int, old: Shape, new: Shape) -> tuple[tuple[str, str], ...]:
    """Return the attributes of an op whose first output has the local shape ``new`` instead of ``old``.

    Sizes and counts among the attributes become local. ``rank``: the number of dims of the op's first input.
    """
    if old == new:
        return op.attributes

    def local(name: str, text: str) -> str:
        if name in ("size", "shape"):
            return _local_sizes(text, old, new)
        if name == "sizes":
            first = int(dict(op.attributes)["dim"]) % rank
            return _local_sizes(text, old[first:], new[first:])
        if name == "split_size":
            dim = int(dict(op.attributes).get("dim", "0")) % len(old)
            return str(new[dim]) if text == str(old[dim]) else text
        if name == "num_groups" and old[1] != new[1]:
            return str(int(text) * new[1].at(1) // old[1].at(1))
        return str(new[0]) if name == "end" and not op.inputs and text == str(old[0]) else text

    return tuple((name, local(name, text)) for name, text in op.attributes)


def _local_sizes(text: str, old: tuple[Extent, ...], new: tuple[Extent, ...]) -> str:
    """Return sizes with local values: ``[12, -1]`` becomes ``[6, -1]`` if six of the twelve are local."""
    words = re.findall(r"[^\[\], ]+", text)
    if len(words) > len(old):
        return text
    local = [str(b) if word == str(a) else word for word, a, b in zip(words, old, new, strict=False)]
    return f"[{', '.join(local)}]"


# The tensor axis comes last: it may split dims that the others have split before, such as tokens.
_ORDER: tuple[Axis, ...] = ("expert", "context", "tensor")
# Arguments that are numbers to compute with, such as the number of tokens, by which routers' losses are divided.
_VALUES = ("other", "value", "fill_value")
_COUNTS_SAMPLES = re.compile(r"(\d+\*)?b(\+\d+)?")


@lru_cache(maxsize=32)
def shard_graph(graph: Graph, sharding: Sharding) -> ShardedGraph:
    """Return the local graph of one rank under a sharding, with its collectives.

    Raises PlanError for a sharding that the graph does not support: a number of heads, tokens or experts that the
    axis's size does not divide, a placement along a dim that cannot be split, an axis for which the graph has nothing
    to split, or a graph that contains its backward.
    """
    if any(op.phase == "backward" for op in graph.ops):
        raise PlanError(
            f"Graph {graph.name!r} contains its own backward, whose ops cannot be split. Capture the model alone, "
            "without its backward."
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
    """Return the graph with ``factor`` times the samples: those of all ranks of the expert axis.

    Raises PlanError if the graph was captured with a fixed batch size.
    """
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
