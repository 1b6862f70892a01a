"""Strategies: every way to split a group over both axes of a mesh, with its seconds and bytes.

A strategy is a pair of choices of the group's root, one per axis. Its costs per step, for M microbatches, are

    compute     M · Σ over ops of (seconds of the whole op · the share of its work that one device does); work that all
                ranks of an axis compute redundantly has its full cost
    exchange    M · the collectives that complete the root's sums, and those inside ops
    gradients   all-reduce, once per step, of the gradients of parameters that are whole along an axis that splits work
    memory      parameters with gradients and optimizer states, and the activations that ``in_flight`` microbatches keep
                for the backward

Communication does not overlap with computation, as in Alpa.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from meshwright.planner.methods.alpa.mesh import AXES, ConversionCosts, Floats, Have, Integers
from meshwright.planner.methods.alpa.op_groups import AxisModel, OpGroup, RootSplit, Want
from meshwright.program.sharding.dims import OpSplit, find_label
from meshwright.program.sharding.propagate import Place
from meshwright.spec import DTYPE_BYTES, Graph

_T = TypeVar("_T")
# The terms of the objective that strategies contribute to.
TERMS = ("compute", "exchange", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategies:
    """The K strategies of a group of ops, with their costs for all ops that the group represents.

    ``pairs`` (K, 2): the index of the root's choice on each axis. ``seconds`` (3, K): per step, in the order of
    `TERMS`. ``memory_bytes`` (K,): per device.
    """

    group: OpGroup
    pairs: Integers
    seconds: Floats
    memory_bytes: Floats

    def __len__(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Amounts:
    """The work of one step that is to be split over a mesh.

    ``graph``: as captured. ``batch_size``: samples per microbatch on the whole mesh. ``num_microbatches``: per step.
    ``in_flight``: microbatches that keep activations at once. ``float_bytes``: bytes per element of floating-point
    activations, None for those of the graph. ``parameter_bytes``: bytes per element of a trained parameter, with
    gradient and optimizer states. ``op_seconds``: seconds of each unsplit op per microbatch, forward and backward.
    """

    graph: Graph
    batch_size: int
    num_microbatches: int
    in_flight: int
    float_bytes: int | None
    parameter_bytes: float
    op_seconds: Floats

    def num_bytes(self, tensor: int) -> int:
        """Return the bytes of a tensor before it is split."""
        return self.graph.tensors[tensor].num_bytes(self.batch_size, self.float_bytes)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Indexes of the storages that a forward keeps for its backward; empty for inference."""
        if self.graph.mode != "training":
            return frozenset()
        return frozenset(self.graph.tensors[i].storage for op in self.graph.ops for i in op.saved)


class MeshGraph(NamedTuple):
    """A graph on the two axes of a mesh: how its ops can be split on each, the work, and the conversion costs."""

    models: tuple[AxisModel, AxisModel]
    amounts: Amounts
    costs: ConversionCosts

    def strategies(self, group: OpGroup) -> Strategies:
        """Return all strategies of a group of ops, with their costs."""
        pairs = np.array(_fitting_pairs(self.models, group), np.int64)
        seconds = np.zeros((len(TERMS), *map(len, group.choices)))
        memory = np.zeros(seconds.shape[1:])
        for index in group.ops:
            share = self._share(group, index)
            seconds[0] += self.amounts.op_seconds[index] * share
            seconds[1] += self._exchanged_inside(group, index)
            memory += self.amounts.in_flight * self._activations(group, index, share)
            gradients, parameters = self._parameters(group, index)
            seconds[2] += gradients
            memory += parameters
        seconds[1] += self._completed(group)
        seconds[:2] *= self.amounts.num_microbatches
        weight = len(self.models[0].folded.stands_for[group.ops[0]])
        at = pairs[:, 0], pairs[:, 1]
        return Strategies(
            group=group,
            pairs=pairs,
            seconds=weight * seconds[:, *at],
            memory_bytes=weight * memory[at],
        )

    def haves(self, group: OpGroup, index: int, tensor: int) -> tuple[list[Have], list[Have]]:
        """Return, for each axis, the layout of output ``tensor`` of op ``index`` under each choice of the root."""
        return _both(
            [
                Have(dict(model.outputs(index, choice if index == group.ops[0] else RootSplit(split)))[tensor])
                for choice, split in zip(group.choices[axis], group.splits[axis][index], strict=True)
            ]
            for axis, model in enumerate(self.models)
        )

    def wants(self, group: OpGroup, index: int, position: int) -> tuple[list[Want], list[Want]]:
        """Return, for each axis, the layout in which an op reads an input under each choice of the root."""
        return _both(
            [model.want(index, position, split) for split in group.splits[axis][index]]
            for axis, model in enumerate(self.models)
        )

    def _parts(self, outer: Sequence[Have | Want], inner: Sequence[Have | Want]) -> Floats:
        """Return the number of parts of a tensor, (choices, choices)."""
        rows = [
            np.array([model.size if item.place is not None else 1.0 for item in items])
            for model, items in zip(self.models, (outer, inner), strict=True)
        ]
        return np.outer(*rows)

    def _share(self, group: OpGroup, index: int) -> Floats:
        """Return the part of an op's work that one device does, (choices, choices)."""
        rows = []
        for axis, model in enumerate(self.models):
            shares = []
            for split in group.splits[axis][index]:
                labels = (find_label(item, split.label) for _, item in model.tensors(index)) if split else ()
                size = next((found[2] for found in labels if found), 1)
                shares.append(-(-size // model.size) / size)
            rows.append(np.array(shares))
        return np.outer(*rows)

    def _exchanged_inside(self, group: OpGroup, index: int) -> Floats:
        """Return the seconds of an op's inner collectives.

        They move the elements of its second input, by the table of placements.
        """
        seconds = np.zeros(tuple(map(len, group.choices)))
        facts, op = self.models[0].facts, self.amounts.graph.ops[index]
        row, dims = facts.rows[index], facts.dims[index]
        if row is None or not dims.inner:
            return seconds
        numbers = self.amounts.graph.tensors[op.inputs[1]].num_elements(self.amounts.batch_size)
        width = self.amounts.float_bytes or DTYPE_BYTES["float32"]
        num_bytes = numbers * width / self._parts(*self.wants(group, index, 1))
        for axis in AXES:
            for at in np.ndindex(seconds.shape):
                split = group.splits[axis][index][at[axis]]
                if split is not None and split.label in dims.inner:
                    size = float(num_bytes[at])
                    seconds[at] += sum(self.costs.seconds(axis, kind, size) for kind in row.exchanges)
        return seconds

    def _completed(self, group: OpGroup) -> Floats:
        """Return the seconds to complete the sums of the root, forward and backward."""
        root, graph = group.ops[0], self.amounts.graph
        seconds = np.zeros(tuple(map(len, group.choices)))
        sums = [
            [model.sums_outputs(root, choice.split) for choice in group.choices[axis]]
            for axis, model in enumerate(self.models)
        ]
        for tensor in graph.ops[root].outputs if any(map(any, sums)) else ():
            # A loss is completed only for printing.
            if not graph.tensors[tensor].shape:
                continue
            lies, size = self.haves(group, root, tensor), float(self.amounts.num_bytes(tensor))
            gradient = self.models[0].facts.requires_gradient(tensor)
            for at in np.ndindex(seconds.shape):
                summed = [sums[axis][at[axis]] for axis in AXES]
                if any(summed):
                    outer, inner = (lies[axis][at[axis]] for axis in AXES)
                    have = _both(Have(None, True) if s else h for s, h in zip(summed, (outer, inner), strict=True))
                    seconds[at] += self.costs.convert_one(have, (outer, inner), size, with_gradient=gradient)
        return seconds

    def _parameters(self, group: OpGroup, index: int) -> tuple[Floats, Floats]:
        """Return the seconds to reduce gradients of the parameters that an op reads first, and their bytes."""
        seconds = np.zeros(tuple(map(len, group.choices)))
        memory = np.zeros_like(seconds)
        facts, graph = self.models[0].facts, self.amounts.graph
        for position, tensor in enumerate(graph.ops[index].inputs):
            if not facts.is_parameter(tensor) or facts.readers[tensor][0] != (index, position):
                continue
            wants = self.wants(group, index, position)
            num_bytes, parts = self.amounts.num_bytes(tensor), self._parts(*wants)
            trained = graph.tensors[tensor].num_elements(0) * self.amounts.parameter_bytes
            memory += (trained if facts.requires_gradient(tensor) else num_bytes) / parts
            for at in np.ndindex(seconds.shape):
                summed = [axis for axis in AXES if wants[axis][at[axis]].sums]
                seconds[at] += self.costs.all_reduce(summed, num_bytes / float(parts[at])) if summed else 0.0
        return seconds, memory

    def _activations(self, group: OpGroup, index: int, share: Floats) -> Floats:
        """Return the bytes that an op makes and that are kept for the backward of a microbatch."""
        graph, op = self.amounts.graph, self.amounts.graph.ops[index]
        memory = np.zeros_like(share)
        for tensor in op.outputs:
            if tensor in self.amounts.kept and graph.tensors[tensor].storage == tensor:
                memory += self.amounts.num_bytes(tensor) / self._parts(*self.haves(group, index, tensor))
        for tensor in op.saved if graph.mode == "training" else ():
            if graph.tensors[tensor].role == "saved":
                memory += self.amounts.num_bytes(tensor) * share
        return memory


def _both(items: Iterable[_T]) -> tuple[_T, _T]:
    outer, inner = items
    return outer, inner


def _fitting_pairs(models: tuple[AxisModel, AxisModel], group: OpGroup) -> list[tuple[int, int]]:
    """Return the pairs of choices under which the axes together divide all tensors of the group that both split."""
    clashes: set[tuple[int, int]] = set()
    for index in group.ops if min(model.size for model in models) > 1 else ():
        outer, inner = (_ways(model, group, index, axis) for axis, model in enumerate(models))
        for at in range(len(outer)):
            pairs = product(dict.fromkeys(outer[at]), dict.fromkeys(inner[at]))
            bad = {(a, b) for a, b in pairs if not _divides(models, index, at, a, b)}
            for i, j in product(range(len(outer[at])), range(len(inner[at]))) if bad else ():
                if (outer[at][i], inner[at][j]) in bad:
                    clashes.add((i, j))
    every = product(*(range(len(choices)) for choices in group.choices))
    return [(i, j) for i, j in every if (i, j) not in clashes]


# The place where an op splits a tensor, and the split.
_Way = tuple[Place, OpSplit | None]


def _ways(model: AxisModel, group: OpGroup, index: int, axis: int) -> list[list[_Way]]:
    """Return, for each tensor of an op, its split by choice; for a scattered root's outputs, the scattered place."""
    found = []
    splits = group.splits[axis][index]
    scatters = [choice.scatter for choice in group.choices[axis]] if index == group.ops[0] else [None] * len(splits)
    num_inputs = len(model.graph.ops[index].inputs)
    for at, (_, item) in enumerate(model.tensors(index)):
        rows: list[_Way] = []
        for split, scatter in zip(splits, scatters, strict=True):
            place = model.facts.dims[index].place_in(item, split)
            rows.append((scatter, None) if scatter and at >= num_inputs else (place, split if place else None))
        found.append(rows)
    return found


def _divides(models: tuple[AxisModel, AxisModel], index: int, at: int, outer: _Way, inner: _Way) -> bool:
    (place, split), (other, other_split) = outer, inner
    if place is None or other is None or place[0] != other[0]:
        return True
    tensor, item = list(models[0].tensors(index))[at]
    both = models[0].size * models[1].size
    extent = models[0].graph.tensors[tensor].shape[place[0]]
    if extent.fixed % both or extent.per_sample % both:
        return False
    if split is None or other_split is None or split.label != other_split.label:
        return place[1] == other[1] or (split is not None and other_split is not None)
    found = find_label(item, split.label)
    return found is not None and place[1] == other[1] and found[2] % (split.parts * both) == 0
