"""Lower a strategy to runnable parts: the ops of each part of a layer, and the slices of tensors it reads and makes.

Each part of a split layer has a graph of its own with the shapes of its slices. It receives slices of what other layers
make if they are contiguous along the dim, and cuts other slices out itself. Parameters and buffers are held as slices,
except that parameters that several layers read stay whole. Every part computes the replicable ops that it needs. A
layer that is not split keeps its ops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from meshwright.planner.methods.flexflow.layers import SoapLayer, find_layers, sums_of
from meshwright.program.sharding.local_graphs import local_attributes
from meshwright.spec import Extent, Graph, Layer, Op, PlanError, Tensor

# Roles of tensors that a rank keeps between steps.
HELD_ROLES = ("parameter", "buffer", "constant")


class Cut(NamedTuple):
    """A slice along a dim: share number ``place`` (from 0) of ``degree`` equal shares.

    With ``outer`` > 1, the dim consists of that number of equal blocks, and the slice has this share of each block.
    """

    dim: int
    outer: int
    degree: int
    place: int


class Read(NamedTuple):
    """A slice of a tensor that a part reads or makes.

    ``tensor`` is the id in the whole graph, ``cuts`` the slice, and ``local`` the id in the graph of the part.
    """

    tensor: int
    cuts: tuple[Cut, ...]
    local: int


@dataclass(slots=True, kw_only=True)
class Part:
    """Part ``number`` of layer ``layer``: its ops, and the tensors that it reads and makes.

    ``ops`` are indexes into ``graph``, the graph of the part (for an unsplit layer, the whole graph). ``held`` maps
    local tensors to the parameter, buffer or constant of the whole graph and its cuts. ``copies`` are the local tensors
    of buffers that the part writes.
    """

    layer: int
    number: int
    graph: Graph
    ops: tuple[int, ...]
    reads: list[Read] = field(default_factory=list)
    makes: list[Read] = field(default_factory=list)
    held: dict[int, tuple[int, tuple[Cut, ...]]] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGraph:
    """A graph split into parts; ``parts`` has one tuple per layer.

    ``sums`` is how the losses of the parts are combined (`sums_of`), None if the loss is not split.
    """

    graph: Graph
    batch_size: int
    parts: tuple[tuple[Part, ...], ...]
    sums: str | None


# `part_name` in the name of a module: layer and part.
PART_NAME = re.compile(r"(?:^|\.)layer(\d+)_part(\d+)")


def part_name(layer: int, part: int) -> str:
    """Return the module name of a part, which identifies its ops in the captured graph of a model in parts."""
    return f"layer{layer}_part{part}"


def split_graph(graph: Graph, batch_size: int, degrees: Sequence[Sequence[int]]) -> SplitGraph:
    """Return the parts of a graph for one batch; ``degrees`` has a row per layer with one degree per SOAP dim.

    Raises PlanError if the degrees do not match the graph's layers.
    """
    layers = find_layers(graph, batch_size, can_run=True)
    fits = len(layers) == len(degrees) and all(
        len(row) == len(layer.dims) and all(dim.size % degree == 0 for dim, degree in zip(layer.dims, row, strict=True))
        for layer, row in zip(layers, degrees, strict=True)
    )
    if not fits:
        raise PlanError(
            f"Degrees for {len(degrees)} layers were given, which do not match the {len(layers)} layers or their dims "
            f"of graph {graph.name!r} at {batch_size} samples. Plan again for this model and batch."
        )
    facts = _Facts(graph, layers, batch_size)
    parts, sums = [], None
    for number, (layer, row) in enumerate(zip(layers, degrees, strict=True)):
        places = list(product(*(range(degree) for degree in row)))
        whole = len(places) == 1
        parts.append(
            tuple(
                facts.whole(number) if whole else _Writer(facts, number, row, place).write(count)
                for count, place in enumerate(places)
            )
        )
        made = graph.ops[layer.ops[0]].outputs if len(layer.ops) == 1 else ()
        if not whole and made and not any(made[0] in dim.places for dim in layer.dims):
            sums = sums_of(graph, graph.ops[layer.ops[0]])
    return SplitGraph(graph=graph, batch_size=batch_size, parts=tuple(parts), sums=sums)


class _Facts:
    """What the parts of all layers ask of the whole graph."""

    def __init__(self, graph: Graph, layers: Sequence[SoapLayer], batch_size: int) -> None:
        self.graph, self.layers, self.batch_size = graph, layers, batch_size
        self.maker = {tensor: index for index, op in enumerate(graph.ops) for tensor in op.outputs}
        self.home = {op: number for number, layer in enumerate(layers) for op in layer.ops}
        self.readers: dict[int, set[int]] = {}
        for op, number in self.home.items():
            for tensor in graph.ops[op].inputs:
                self.readers.setdefault(tensor, set()).add(number)

    def made(self, number: int) -> list[int]:
        """Return the outputs of a layer that other layers read, or that the graph returns."""
        made = [tensor for op in self.layers[number].ops for tensor in self.graph.ops[op].outputs]
        return [t for t in made if self.readers.get(t, set()) - {number} or t in self.graph.outputs]

    def needed(self, number: int) -> list[int]:
        """Return the ops of a layer and the replicable ops that they depend on, ascending."""
        found, todo = set(self.layers[number].ops), [*self.layers[number].ops]
        while todo:
            for tensor in self.graph.ops[todo.pop()].inputs:
                op = self.maker.get(tensor)
                if op is not None and self.graph.ops[op].replicable and op not in found:
                    found.add(op)
                    todo.append(op)
        return sorted(found)

    def given(self, ops: Sequence[int]) -> list[int]:
        """Return the tensors that ops read from graph inputs and from other layers."""
        read = dict.fromkeys(tensor for op in ops for tensor in self.graph.ops[op].inputs)
        held = {tensor for tensor in read if self.graph.tensors[tensor].role in HELD_ROLES}
        return [t for t in read if t not in held and self.maker.get(t) not in ops]

    def whole(self, number: int) -> Part:
        """Return the only part of a layer that is not split."""
        ops = self.needed(number)
        reads = [Read(tensor, (), tensor) for tensor in self.given(ops)]
        makes = [Read(tensor, (), tensor) for tensor in self.made(number)]
        return Part(layer=number, number=0, graph=self.graph, ops=tuple(ops), reads=reads, makes=makes)


class _Writer:
    """Writes the graph of one part of a layer that is split."""

    def __init__(self, facts: _Facts, number: int, degrees: Sequence[int], place: Sequence[int]) -> None:
        self._facts, self._number, self._layer = facts, number, facts.layers[number]
        self._shares = list(zip(self._layer.dims, degrees, place, strict=True))
        self._tensors: list[Tensor] = []
        self._ops: list[Op] = []
        self._local: dict[int, int] = {}
        empty = Graph(name="", tensors=(), ops=(), layers=(), inputs=(), outputs=(), mode=facts.graph.mode)
        self._part = Part(layer=number, number=0, graph=empty, ops=())

    def write(self, number: int) -> Part:
        """Return the part, with ``number`` as its number in the layer."""
        graph, part = self._facts.graph, self._part
        for index in self._facts.needed(self._number):
            op = graph.ops[index]
            is_own = index in self._layer.ops
            inputs = tuple(self._read(tensor, is_cut=is_own) for tensor in op.inputs)
            if op.writes_buffers:
                part.copies |= {local for local in inputs if self._tensors[local].role == "buffer"}
            outputs = tuple(self._add(tensor, self._cuts(tensor) if is_own else ()) for tensor in op.outputs)
            self._local.update(zip(op.outputs, outputs, strict=True))
            self._ops.append(replace(self._own(op, outputs), inputs=inputs, outputs=outputs, saved=()))
        for tensor in self._facts.made(self._number):
            part.makes.append(Read(tensor, self._cuts(tensor), self._local[tensor]))
        part.number, part.ops = number, tuple(range(len(self._ops)))
        part.graph = replace(
            part.graph,
            name=part_name(self._number, number),
            tensors=tuple(self._tensors),
            ops=tuple(self._ops),
            layers=(Layer(name="part", start=0, stop=len(self._ops)),),
        )
        return part

    def _own(self, op: Op, outputs: Sequence[int]) -> Op:
        """An op on the shares: sizes among its attributes are those of its results; a loss of classes is summed."""
        graph = self._facts.graph
        if op.outputs and not any(op.outputs[0] in dim.places for dim, degree, _ in self._shares if degree > 1):
            is_summed = sums_of(graph, op) == "classes" and len(self._layer.ops) == 1
            rest = tuple(item for item in op.attributes if item[0] != "reduction")
            return replace(op, attributes=(*rest, ("reduction", "2"))) if is_summed else op
        if not op.outputs:
            return op
        rank = len(graph.tensors[op.inputs[0]].shape) if op.inputs else 0
        old, new = graph.tensors[op.outputs[0]].shape, self._tensors[outputs[0]].shape
        return replace(op, attributes=local_attributes(op, rank, old, new))

    def _cuts(self, tensor: int) -> tuple[Cut, ...]:
        return tuple(
            Cut(*dim.places[tensor], degree, place)
            for dim, degree, place in self._shares
            if degree > 1 and tensor in dim.places
        )

    def _read(self, tensor: int, *, is_cut: bool) -> int:
        """The local tensor of what the part's ops read; first it is read, held or computed whole, then cut."""
        facts, cuts = self._facts, self._cuts(tensor) if is_cut else ()
        if facts.maker.get(tensor) in self._layer.ops:
            return self._local[tensor]
        if (known := self._local.get(~tensor if cuts else tensor)) is not None:
            return known
        role = facts.graph.tensors[tensor].role
        if role in HELD_ROLES:
            is_own = role != "constant" and len(facts.readers.get(tensor, ())) == 1
            local = self._add(tensor, cuts if is_own else ())
            self._part.held[local] = tensor, cuts if is_own else ()
            cut_here = () if is_own else cuts
        elif tensor in self._local:
            local, cut_here = self._local[tensor], cuts
        else:
            is_given = role == "input"
            in_runs = () if is_given else tuple(cut for cut in cuts if cut.outer == 1)
            local = self._add(tensor, in_runs, role="input")
            self._part.reads.append(Read(tensor, in_runs, local))
            cut_here = tuple(cut for cut in cuts if cut not in in_runs)
        for cut in cut_here:
            local = self._cut(local, cut)
        self._local[~tensor if cuts else tensor] = local
        return local

    def _cut(self, local: int, cut: Cut) -> int:
        """Write the ops that cut a tensor."""
        shape = [extent.fixed for extent in self._tensors[local].shape]
        run = shape[cut.dim] // cut.outer
        share = run // cut.degree
        if cut.outer > 1:
            apart = [*shape[: cut.dim], cut.outer, run, *shape[cut.dim + 1 :]]
            local = self._call("aten.reshape.default", local, apart, [("shape", str(apart))])
        dim = cut.dim + (cut.outer > 1)
        cut_shape = [extent.fixed for extent in self._tensors[local].shape]
        cut_shape[dim] = share
        ends = [("dim", str(dim)), ("start", str(cut.place * share)), ("end", str((cut.place + 1) * share))]
        local = self._call("aten.slice.Tensor", local, cut_shape, ends)
        if cut.outer > 1:
            joined = [*shape[: cut.dim], cut.outer * share, *shape[cut.dim + 1 :]]
            local = self._call("aten.reshape.default", local, joined, [("shape", str(joined))])
        return local

    def _call(self, kind: str, local: int, shape: Sequence[int], attributes: list[tuple[str, str]]) -> int:
        made = len(self._tensors)
        name = f"cut_{made}"
        facts = replace(
            self._tensors[local], name=name, shape=tuple(map(Extent, shape)), role="activation", storage=made
        )
        self._tensors.append(facts)
        self._ops.append(Op(name=name, kind=kind, inputs=(local,), outputs=(made,), attributes=tuple(attributes)))
        return made

    def _add(self, tensor: int, cuts: Sequence[Cut], role: str | None = None) -> int:
        whole = self._facts.graph.tensors[tensor]
        shape = [extent.at(self._facts.batch_size) for extent in whole.shape]
        for cut in cuts:
            shape[cut.dim] //= cut.degree
        local = len(self._tensors)
        made = replace(whole, shape=tuple(map(Extent, shape)), storage=local, aliases=())
        self._tensors.append(made if role is None else replace(made, role="input"))
        return local


def blocks_of(makes: Read, batch_size: int, graph: Graph) -> tuple[range, ...]:
    """Return the range of indexes along each dim that a slice has of its tensor."""
    found = [range(extent.at(batch_size)) for extent in graph.tensors[makes.tensor].shape]
    for cut in makes.cuts:
        share = len(found[cut.dim]) // cut.degree
        found[cut.dim] = range(cut.place * share, (cut.place + 1) * share)
    return tuple(found)


def find_pieces(
    read: Read, made: Sequence[Read], batch_size: int, graph: Graph
) -> Iterator[tuple[int, tuple[tuple[int, int, int], ...], tuple[int, ...]]]:
    """Yield the pieces of a tensor that a part reads from the parts in ``made``, which make it, in their order.

    Each piece is (number of the making part, (dim, start, length) within that part's slice for each dim of which only a
    range is read, start of the piece in the whole tensor along each dim).
    """
    wanted = blocks_of(read, batch_size, graph)
    for number, item in enumerate(made):
        block = blocks_of(item, batch_size, graph)
        both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted, block, strict=True)]
        if all(len(common) or not len(own) for common, own in zip(both, wanted, strict=True)):
            cut = tuple(
                (dim, common.start - own.start, len(common))
                for dim, (common, own) in enumerate(zip(both, block, strict=True))
                if len(common) < len(own)
            )
            yield number, cut, tuple(common.start for common in both)
