"""The result of the intra-operator pass: the layout of every op and tensor of a graph on both axes of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.planner.methods.alpa.groups import AxisModel, OpGroup, RootSplit
from meshwright.planner.methods.alpa.integer_program import RoutedTensor, StrategySolution
from meshwright.planner.methods.alpa.mesh import AXES
from meshwright.planner.methods.alpa.strategies import TERMS, MeshGraph, Strategies
from meshwright.program.sharding.dims import OpSplit
from meshwright.program.sharding.propagate import Place
from meshwright.spec import Graph
from meshwright.spec.graph import Extent
from meshwright.spec.sharding import Layout, Replicate, Shard

# Printed words for the split of an op on one axis.
_WORDS = {
    "samples": "over samples",
    "columns": "by columns of a parameter",
    "rows": "by rows, summed",
    "dims": "along other dims",
    "whole": "computed by all alike",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """Placements of a graph on a mesh of ``shape`` devices.

    ``layouts`` are those of each tensor on both axes; tensors that every rank makes or loads in any layout count as
    whole. ``splits`` are those of each op, as the table of placements names them for ``batch_size`` samples at once;
    ``ways`` are their names for printing, "" for ops without a fixed layout. ``seconds`` is the total per step,
    ``terms`` its parts: compute, exchange (sums and collectives inside ops), gradients, conversions. ``memory_bytes``
    is per device. ``solution`` is the solver's result.
    """

    graph: Graph = field(repr=False)
    shape: tuple[int, int]
    batch_size: int
    layouts: tuple[tuple[Layout, Layout], ...] = field(repr=False)
    splits: tuple[tuple[OpSplit | None, OpSplit | None], ...] = field(repr=False)
    ways: tuple[tuple[str, str], ...] = field(repr=False)
    seconds: float
    terms: dict[str, float]
    memory_bytes: float
    num_groups: int
    solution: StrategySolution

    @property
    def gap(self) -> float:
        """The largest possible improvement by the solver's bound, as a share; 0 if optimality is proven."""
        return max(self.seconds - self.solution.bound_s, 0.0) / self.seconds if self.seconds else 0.0

    def explain(self) -> str:
        """Return the choices and their costs in a few lines."""
        outer, inner = self.shape
        lines = [
            f"Placements of {self.graph.name!r} on {outer} x {inner} devices: {self.seconds:.4g} s per step, "
            f"{self.memory_bytes / 2**30:.3g} GiB per device.",
            "  " + ", ".join(f"{name} {seconds:.4g} s" for name, seconds in self.terms.items()),
        ]
        for axis in AXES:
            if self.shape[axis] > 1:
                counts = Counter(way[axis] for way in self.ways if way[axis])
                said = ", ".join(f"{count} ops {_WORDS[way]}" for way, count in counts.most_common())
                lines.append(f"  axis {axis} of {self.shape[axis]}: {said}")
        lines.append(
            f"  {self.solution.num_variables} variables and {self.solution.num_constraints} rows for {self.num_groups} "
            f"groups of ops; {self.solution.status}, gap {self.gap:.2%}"
        )
        return "\n".join(lines)


def lay_out(
    sharded: MeshGraph, strategies: Sequence[Strategies], tensors: Sequence[RoutedTensor], solution: StrategySolution
) -> Placements:
    """Return the placements of a solution, expanded from the kept ops to all ops that they stand for."""
    graph, models = sharded.amounts.graph, sharded.models
    splits: list[tuple[OpSplit | None, OpSplit | None]] = [(None, None)] * len(graph.ops)
    ways = [("", "")] * len(graph.ops)
    layouts: list[tuple[Layout, Layout]] = [(Replicate(), Replicate())] * len(graph.tensors)
    terms = dict.fromkeys((*TERMS, "conversions"), 0.0)
    memory = 0.0
    for item, k in zip(strategies, solution.chosen, strict=True):
        terms |= {name: terms[name] + float(item.seconds[at, k]) for at, name in enumerate(TERMS)}
        memory += float(item.memory_bytes[k])
        pair = tuple(item.pairs[k].tolist())
        for index in item.group.ops:
            choices = [_choice(item.group, index, axis, pair[axis]) for axis in AXES]
            own = choices[0].split, choices[1].split
            lies = [_tensor_places(model, index, choice) for model, choice in zip(models, choices, strict=True)]
            words = [_way(model, index, split) for model, split in zip(models, own, strict=True)]
            for same in models[0].folded.stands_for[index]:
                splits[same], ways[same] = own, (words[0], words[1])
                ids = (*graph.ops[same].inputs, *graph.ops[same].outputs)
                for tensor, outer, inner in zip(ids, *lies, strict=True):
                    if tensor in graph.ops[same].outputs or models[0].facts.is_parameter(tensor):
                        layouts[tensor] = _layout(sharded, outer), _layout(sharded, inner)
    for tensor in tensors:
        have = tensor.have[solution.chosen[tensor.producer]]
        for want in {int(wants[solution.chosen[reader]]) for reader, wants in tensor.readers}:
            terms["conversions"] += float(tensor.seconds[have, want])
            memory += float(tensor.memory_bytes[have, want])
    return Placements(
        graph=graph,
        shape=sharded.costs.mesh.shape,
        batch_size=sharded.amounts.batch_size,
        layouts=tuple(layouts),
        splits=tuple(splits),
        ways=tuple(ways),
        seconds=sum(terms.values()),
        terms=terms,
        memory_bytes=memory,
        num_groups=len(strategies),
        solution=solution,
    )


def _choice(group: OpGroup, index: int, axis: int, at: int) -> RootSplit:
    return group.choices[axis][at] if index == group.ops[0] else RootSplit(group.splits[axis][index][at])


def _tensor_places(model: AxisModel, index: int, choice: RootSplit) -> list[Place]:
    """Return the places of an op's inputs, as it reads them, and of its outputs."""
    dims = model.facts.dims[index]
    inputs = [dims.place_in(item, choice.split) for item in dims.inputs]
    return [*inputs, *(place for _, place in model.outputs(index, choice))]


def _layout(sharded: MeshGraph, place: Place) -> Layout:
    if place is None:
        return Replicate()
    dim, parts = place
    samples = sharded.models[0].facts.samples * sharded.amounts.batch_size
    symbolic = sharded.amounts.graph.batch_size is None and parts % samples == 0
    return Shard(dim, Extent(0, parts // samples) if symbolic else Extent(parts))


def _way(model: AxisModel, index: int, split: OpSplit | None) -> str:
    if split is None:
        return "whole"
    dims = model.facts.dims[index]
    lies = [(tensor, dims.place_in(item, split)) for tensor, item in model.tensors(index)]
    if any(model.cuts_samples(*item) for item in lies):
        return "samples"
    if not dims.in_outputs(split.label) and split.label not in dims.inner:
        return "rows"
    return "columns" if any(place and model.facts.is_parameter(tensor) for tensor, place in lies) else "dims"
