"""Express Alpa's placements as a plan: replicas, and the tensor axis of a `Sharding` with placements of single ops.

A plan has one sharding for all stages. Its replicas split samples only, its tensor axis anything but samples. So
placements can be expressed only if each axis of the mesh does one of the two, and at most one axis splits more than
samples. First, the rules for the tensor axis (`program.sharding.sharding_rules`) lay out all ops. Every op that Alpa
placed differently then gets an explicit placement, until propagation lays out all ops and tensors as the integer
program did. Differences that remain cannot be expressed, for example a partial sum that is scattered for one reader and
whole for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.planner.methods.alpa.intra import Placements
from meshwright.planner.methods.alpa.mesh import AXES
from meshwright.planner.methods.alpa.op_groups import ATTENTION
from meshwright.program.sharding.axis_facts import AxisGraph
from meshwright.program.sharding.dims import OpSplit
from meshwright.program.sharding.propagate import Place, PropagationState, propagate
from meshwright.program.sharding.sharding_rules import rule_for
from meshwright.spec import Extent, OpPlacement, PlanError, Replicate, Shard, Sharding
from meshwright.spec.sharding import UNSHARDED, Layout

# Each round places the first op of every chain that differs; the ops after it are then usually right.
_ROUNDS = 32


class Expressed(NamedTuple):
    """Placements as a plan expresses them: ``replicas`` teams of ``sharding.width`` devices, all with ``sharding``."""

    replicas: int
    sharding: Sharding


def express(placements: Placements) -> Expressed:
    """Return the number of replicas and the sharding that have the effect of the placements.

    Raises PlanError, with the reason, if no plan can express the placements.
    """
    shared = [axis for axis in AXES if placements.shape[axis] > 1 and not _is_of_samples(placements, axis)]
    replicas = 1
    for axis in AXES:
        replicas *= 1 if axis in shared else placements.shape[axis]
    if not shared:
        return Expressed(replicas, UNSHARDED)
    if len(shared) > 1:
        raise PlanError(
            f"Both axes of the mesh of {placements.shape} devices split more than samples, but a plan has replicas and "
            "one tensor axis. Call `place_ops` with 'samples' in uses for one axis, or give a mesh with one axis of "
            "size 1."
        )
    axis = shared[0]
    if any(way[axis] == "samples" for way in placements.ways):
        raise PlanError(
            f"Axis {axis} of the mesh splits samples of some ops and other dims of others; the tensor axis of a plan "
            "splits no samples. Call `place_ops` with 'model' in uses for this axis."
        )
    return Expressed(replicas, _sharding(placements, axis))


def _is_of_samples(placements: Placements, axis: int) -> bool:
    """Return whether an axis splits the samples of all ops that depend on them, and nothing else."""
    graph = placements.graph
    for op, way in zip(graph.ops, placements.ways, strict=True):
        batched = any(extent.per_sample for i in (*op.inputs, *op.outputs) for extent in graph.tensors[i].shape)
        if way[axis] not in ("", "samples") and (batched or way[axis] != "whole"):
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """One axis of placements, in terms of the graph of one sample."""

    placements: Placements
    axis: int
    facts: AxisGraph

    def split(self, index: int) -> OpSplit | None:
        """Return the split of an op."""
        split = self.placements.splits[index][self.axis]
        samples = self.facts.samples * self.placements.batch_size
        if split is None or self.placements.graph.batch_size is not None or split.parts % samples:
            return split
        return OpSplit(split.label, split.parts // self.placements.batch_size)

    def differing(self, state: PropagationState) -> Iterator[int]:
        """Yield ops whose split differs."""
        for index, way in enumerate(self.placements.ways):
            if way[self.axis] and state.splits[index] != self.split(index):
                yield index

    def elsewhere(self, state: PropagationState) -> Iterator[int]:
        """Yield tensors whose layout differs."""
        for index, way in enumerate(self.placements.ways):
            for tensor in self.facts.graph.ops[index].outputs if way[self.axis] else ():
                lies = _layout(self.facts, state.places.get(tensor))
                if self.facts.shapes[tensor] and lies != self.placements.layouts[tensor][self.axis]:
                    yield tensor


def _sharding(placements: Placements, axis: int) -> Sharding:
    facts = AxisGraph(placements.graph, placements.shape[axis])
    wanted = _Wanted(placements=placements, axis=axis, facts=facts)
    reasons = []
    for sequence_parallel in (False, True):
        sharding = Sharding(tensor=placements.shape[axis], sequence_parallel=sequence_parallel)
        try:
            return _settled(wanted, sharding)
        except PlanError as error:
            reasons.append(str(error))
    raise PlanError(f"A plan cannot express these placements: {reasons[0]} With sequence parallelism: {reasons[1]}")


def _settled(wanted: _Wanted, sharding: Sharding) -> Sharding:
    """Return the sharding with placements of ops that gives the wanted placements.

    Raises PlanError if no sharding gives them.
    """
    own = {index: _placement(wanted, index) for index in _without_heads(wanted)}
    for _ in range(_ROUNDS):
        sharding = replace(sharding, placements=tuple(own[index] for index in sorted(own)))
        state = propagate(wanted.facts, rule_for("tensor", sharding))
        differing = [index for index in wanted.differing(state) if index not in own]
        if not differing:
            break
        made = {tensor for index in differing for tensor in wanted.facts.graph.ops[index].outputs}
        first = [i for i in differing if made.isdisjoint(wanted.facts.graph.ops[i].inputs)]
        own |= {index: _placement(wanted, index) for index in first}
    graph = wanted.facts.graph
    for index in wanted.differing(state):
        raise PlanError(f"Op {graph.ops[index].name!r} is split along {wanted.split(index)}, which no placement gives.")
    for tensor in wanted.elsewhere(state):
        raise PlanError(
            f"Tensor {graph.tensors[tensor].name!r} has layout {wanted.placements.layouts[tensor][wanted.axis]}, but "
            f"the program lays it out as {_layout(wanted.facts, state.places.get(tensor))}."
        )
    return sharding


def _without_heads(wanted: _Wanted) -> Iterator[int]:
    """Yield attention ops not split over heads, since the rules require that the axis divides the heads."""
    for index, op in enumerate(wanted.facts.graph.ops):
        if op.kind.startswith(ATTENTION):
            dims = wanted.facts.dims[index]
            place = dims.place_in(dims.outputs[0], wanted.split(index))
            if place is None or place[0] != len(dims.outputs[0]) - 3:
                yield index


def _placement(wanted: _Wanted, index: int) -> OpPlacement:
    op, dims, split = wanted.facts.graph.ops[index], wanted.facts.dims[index], wanted.split(index)
    if split is None:
        return OpPlacement(op=op.name)
    output = dims.place_in(dims.outputs[0], split)
    given = dims.place_in(dims.inputs[0], split) if dims.inputs else None
    if output is not None and output[1] == 1:
        return OpPlacement(op=op.name, output_dim=output[0])
    if output is None and given is not None and given[1] == 1:
        return OpPlacement(op=op.name, input_dim=given[0])
    raise PlanError(
        f"Op {op.name!r} is split along {split}, but no dim of its first input or output has that label. This is a "
        "defect; please report it."
    )


def _layout(facts: AxisGraph, place: Place) -> Layout:
    if place is None:
        return Replicate()
    batched, rest = divmod(place[1], facts.samples)
    symbolic = facts.graph.batch_size is None and not rest
    return Shard(place[0], Extent(0, batched) if symbolic else Extent(place[1]))
