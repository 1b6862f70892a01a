"""Local graph: what one rank of an axis computes, given how every op and tensor is split.

Tensors keep their ids and get local shapes; ops keep their order and get local FLOPs. Where ops read a tensor in
another layout, an op of kind ``mesh.*`` comes before the first that reads it so; its output is a new tensor. A sum
over the ranks is a new tensor, too, from which the op after it makes the old one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.program.sharding.convert import Conversions, split_shape
from meshwright.program.sharding.dims import find_label
from meshwright.spec.graph import Extent

Shape = tuple[Extent, ...]

if TYPE_CHECKING:
    from meshwright.program.sharding.dims import OpSplit
    from meshwright.program.sharding.propagate import PropagationState
    from meshwright.spec.collective import Axis
    from meshwright.spec.graph import Graph, Op, Tensor
    from meshwright.spec.sharding import Sharding


def localise(state: PropagationState, axis: Axis, sharding: Sharding) -> tuple[Graph, Conversions, tuple[int, ...]]:
    """Return the local graph, its conversions, and the new index of each op of the whole graph."""
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
    """The attributes of an op whose first output has the shape ``new`` in place of ``old``.

    ``rank``: the dims of its first input.
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
