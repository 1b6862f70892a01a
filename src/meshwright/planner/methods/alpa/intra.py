"""The intra-operator pass (`place_ops`): split every op and tensor of a graph over a mesh; its result (`Placements`).

    fold             keep one block of a stack of equal blocks                          (`op_groups`)
    find_groups      group ops that are split alike; list the splits of each group      (`op_groups`)
    strategies       pairs of splits for both axes, with seconds and bytes              (`strategies`)
    conversions      of tensors between groups, with seconds and bytes                  (`mesh`)
    solve_choices    choose a strategy per group by the integer program                 (`integer_program`)

The objective is the seconds per step of one device, without overlap. Source: Zheng et al., Alpa, OSDI 2022, section 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from meshwright.cost import CostModel
from meshwright.cost.optimizers import state_bytes
from meshwright.planner.methods.alpa.integer_program import RoutedTensor, StrategyNode, StrategySolution, solve_choices
from meshwright.planner.methods.alpa.mesh import AXES, ConversionCosts, Floats, Have, Integers, LogicalMesh
from meshwright.planner.methods.alpa.op_groups import AxisModel, AxisUse, OpGroup, RootSplit, Want, find_groups, fold
from meshwright.planner.methods.alpa.strategies import TERMS, Amounts, MeshGraph, Strategies
from meshwright.program.sharding.dims import OpSplit
from meshwright.program.sharding.local_graphs import with_samples
from meshwright.program.sharding.propagate import Place
from meshwright.spec import Extent, Graph, PlanError, Replicate, Shard, Workload
from meshwright.spec.sharding import Layout

# Printed words for the split of an op on one axis.
_WORDS = {
    "samples": "over samples",
    "columns": "by columns of a parameter",
    "rows": "by rows, with a sum",
    "dims": "along other dims",
    "whole": "computed in full by all devices",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """How a graph is split over a mesh of ``shape`` devices: every op and tensor, on both axes (outer, inner).

    ``layouts`` has one pair per tensor; tensors that every rank can make or load in any layout count as replicated.
    ``splits`` has one pair per op, for ``batch_size`` samples at once. ``ways`` names each split for printing: samples,
    columns, rows, dims or whole, "" for ops without a fixed layout. ``seconds`` is the total per step, ``terms`` its
    parts: compute, exchange (sums and collectives inside ops), gradients, conversions. ``memory_bytes`` is per device.
    ``num_groups`` counts groups of ops; ``solution`` is the solver's result.
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
        """The share of ``seconds`` by which a better solution could at most be faster; 0 if optimality is proven."""
        return max(self.seconds - self.solution.bound_s, 0.0) / self.seconds if self.seconds else 0.0

    def explain(self) -> str:
        """Return a few printable lines: seconds and their terms, bytes, and how many ops are split in which way."""
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
            f"  {self.solution.num_variables} variables and {self.solution.num_constraints} constraints for "
            f"{self.num_groups} groups of ops; solver: {self.solution.status}, gap {self.gap:.2%}"
        )
        return "\n".join(lines)


def lay_out(
    sharded: MeshGraph, strategies: Sequence[Strategies], tensors: Sequence[RoutedTensor], solution: StrategySolution
) -> Placements:
    """Return the placements of a solution for the whole graph: equal blocks get the splits of the one kept block."""
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


_L = TypeVar("_L", Have, Want)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceProblem:
    """The input of the integer program: ``nodes`` and ``tensors``; ``strategies[i]`` are those of node i's ops."""

    strategies: tuple[Strategies, ...]
    nodes: tuple[StrategyNode, ...]
    tensors: tuple[RoutedTensor, ...]


def place_ops(
    graph: Graph,
    mesh: LogicalMesh,
    amounts: Amounts,
    *,
    uses: tuple[AxisUse, AxisUse] = ("any", "any"),
    tiled: bool = True,
    following: bool = True,
    memory_limit_bytes: float | None = None,
    deadline_s: float = 600.0,
) -> Placements:
    """Split every op of a graph over both axes of a mesh such that a step takes the least seconds.

    ``amounts``: the work of a step (`amounts_of`). ``uses``: what each axis may split. ``tiled``: equal blocks in a row
    get the same splits and are solved as one. ``following``: cheap ops are split like their deepest operand; otherwise
    the program chooses for every op. Raises NoFeasiblePlanError if nothing fits into ``memory_limit_bytes`` per device
    or the time (``deadline_s``, in seconds) ends, MeshwrightError if highspy is not installed.
    """
    sharded, problem = make_choice_problem(graph, mesh, amounts, uses=uses, tiled=tiled, following=following)
    solution = solve_choices(
        problem.nodes, problem.tensors, memory_limit_bytes=memory_limit_bytes, deadline_s=deadline_s
    )
    return lay_out(sharded, problem.strategies, problem.tensors, solution)


def make_choice_problem(
    graph: Graph,
    mesh: LogicalMesh,
    amounts: Amounts,
    *,
    uses: tuple[AxisUse, AxisUse] = ("any", "any"),
    tiled: bool = True,
    following: bool = True,
) -> tuple[MeshGraph, ChoiceProblem]:
    """Return the sharded graph and the integer program that `place_ops` solves; parameters as there.

    Raises GraphError for a batch size that the graph does not support, PlanError if ``amounts`` is of another graph.
    """
    graph.check_batch_size(amounts.batch_size)
    if len(amounts.op_seconds) != len(graph.ops):
        raise PlanError(
            f"Seconds of {len(amounts.op_seconds)} ops were given for graph {graph.name!r} of {len(graph.ops)} ops; "
            "expected one per op."
        )
    folded = fold(graph, tiled=tiled)
    whole = graph if graph.batch_size is not None else with_samples(graph, amounts.batch_size)
    outer, inner = (AxisModel(whole, folded, size, following=following) for size in mesh.shape)
    sharded = MeshGraph((outer, inner), amounts, ConversionCosts(mesh))
    strategies = [sharded.strategies(group) for group in find_groups(sharded.models, uses)]
    nodes = [StrategyNode(seconds=item.seconds.sum(axis=0), memory_bytes=item.memory_bytes) for item in strategies]
    tensors = _tensors(sharded, strategies)
    return sharded, ChoiceProblem(strategies=tuple(strategies), nodes=tuple(nodes), tensors=tuple(tensors))


def amounts_of(
    graph: Graph,
    workload: Workload,
    cost: CostModel,
    *,
    batch_size: int,
    num_microbatches: int = 1,
    in_flight: int = 1,
) -> Amounts:
    """Return the work of one step, estimated by the cost model for the first device kind of its cluster.

    A microbatch has ``batch_size`` samples on the whole mesh; a step has ``num_microbatches``, of which ``in_flight``
    keep their activations at once.
    """
    kind = cost.cluster.device_kind(0)
    costs = cost.estimate_ops(graph, batch_size, kind)
    training = workload.kind == "training"
    states = workload.numbers.gradient_bytes + state_bytes(workload.optimizer, workload.precision)
    return Amounts(
        graph=graph,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        in_flight=in_flight,
        float_bytes=workload.float_bytes,
        parameter_bytes=workload.numbers.value_bytes + (states if training else 0),
        op_seconds=costs.microbatch_s(trains=training),
    )


class _Maker(NamedTuple):
    """The node that lays a tensor out, and its layouts on each axis by choice.

    For a parameter this is its first reader.
    """

    node: int
    haves: tuple[Sequence[Have], Sequence[Have]]


def _tensors(sharded: MeshGraph, strategies: Sequence[Strategies]) -> list[RoutedTensor]:
    """Return the tensors that may need conversions for their readers."""
    node_of = {index: v for v, item in enumerate(strategies) for index in item.group.ops}
    models, graph = sharded.models, sharded.amounts.graph
    found = []
    for tensor, weight, slots in sharded.models[0].folded.readings:
        readers = [(i, at) for i, at in slots if i in node_of and models[0].reads(i, at)]
        if tensor in models[0].free or not graph.tensors[tensor].shape or not readers:
            continue
        maker = _maker(sharded, strategies, node_of, tensor, readers)
        if graph.tensors[tensor].role == "parameter":
            readers = readers[1:]
        if maker is not None and readers:
            found.append(_tensor(sharded, strategies, node_of, tensor, weight, maker, readers))
    return found


def _maker(
    sharded: MeshGraph,
    strategies: Sequence[Strategies],
    node_of: Mapping[int, int],
    tensor: int,
    readers: Sequence[tuple[int, int]],
) -> _Maker | None:
    """Return the maker of a tensor: its op, or for a parameter its first reader."""
    facts = sharded.models[0].facts
    if facts.is_parameter(tensor):
        index, position = readers[0]
        outer, inner = sharded.wants(strategies[node_of[index]].group, index, position)
        return _Maker(node_of[index], ([Have(*w) for w in outer], [Have(*w) for w in inner]))
    made = facts.producer.get(tensor)
    if made is None or made not in node_of:
        return None
    return _Maker(node_of[made], sharded.haves(strategies[node_of[made]].group, made, tensor))


def _tensor(
    sharded: MeshGraph,
    strategies: Sequence[Strategies],
    node_of: Mapping[int, int],
    tensor: int,
    weight: int,
    maker: _Maker,
    slots: Sequence[tuple[int, int]],
) -> RoutedTensor:
    amounts, models = sharded.amounts, sharded.models
    have, haves = _numbered(maker.haves, strategies[maker.node].pairs, {})
    numbers: dict[tuple[Want, Want], int] = {}
    readers, saves = [], False
    for index, position in slots:
        item = strategies[node_of[index]]
        want, _ = _numbered(sharded.wants(item.group, index, position), item.pairs, numbers)
        readers.append((node_of[index], want))
        saves |= tensor in amounts.graph.ops[index].saved and amounts.graph.mode == "training"
    wants = list(numbers)
    size = float(amounts.num_bytes(tensor))
    gradient = models[0].facts.requires_gradient(tensor)
    if models[0].facts.is_parameter(tensor):
        seconds = _shared_parameter(sharded, haves, wants, size, with_gradient=gradient)
    else:
        seconds = sharded.costs.convert(haves, wants, size, with_gradient=gradient)
    return RoutedTensor(
        producer=maker.node,
        have=have,
        readers=tuple(readers),
        seconds=weight * amounts.num_microbatches * seconds,
        memory_bytes=weight * amounts.in_flight * saves * _copied(models, haves, wants, size),
    )


def _shared_parameter(
    sharded: MeshGraph,
    haves: Sequence[tuple[Have, Have]],
    wants: Sequence[tuple[Want, Want]],
    size: float,
    *,
    with_gradient: bool,
) -> Floats:
    """Return seconds per microbatch of a parameter, laid out for its first reader, for another reader.

    Readers with the same layout need only the sum of their gradients, once per step; along an axis where the first
    reader's gradients are summed anyway, not even that.
    """
    lies = [(Have(outer.place), Have(inner.place)) for outer, inner in haves]
    seconds = sharded.costs.convert(lies, wants, size, with_gradient=with_gradient)
    for i, have in enumerate(haves):
        for j, want in enumerate(wants):
            if all(h.place == w.place for h, w in zip(have, want, strict=True)):
                axes = [axis for axis in AXES if want[axis].sums and not have[axis].sums]
                whole = [model.size for model, w in zip(sharded.models, want, strict=True) if w.place is not None]
                summed = sharded.costs.all_reduce(axes, size / float(np.prod(whole))) if axes else 0.0
                seconds[i, j] = summed / sharded.amounts.num_microbatches
    return seconds


def _numbered(
    lies: tuple[Sequence[_L], Sequence[_L]], pairs: Integers, numbers: dict[tuple[_L, _L], int]
) -> tuple[Integers, list[tuple[_L, _L]]]:
    """Return a number for the layout under each strategy, and the layouts by number; ``numbers`` is extended."""
    outer, inner = lies
    found = [numbers.setdefault((outer[i], inner[j]), len(numbers)) for i, j in pairs.tolist()]
    return np.array(found, np.int64), list(numbers)


def _copied(
    models: tuple[AxisModel, AxisModel],
    haves: Sequence[tuple[Have, Have]],
    wants: Sequence[tuple[Want, Want]],
    size: float,
) -> Floats:
    """Return the bytes of the converted tensor, which its reader keeps in addition to the original."""
    parts = [
        float(np.prod([m.size for m, w in zip(models, want, strict=True) if w.place is not None])) for want in wants
    ]
    moved = [[any(h.place != w.place for h, w in zip(a, b, strict=True)) for b in wants] for a in haves]
    return np.where(moved, size / np.array(parts)[None, :], 0.0)
