"""Groups of ops that are split together, and their possible splits (`find_groups`); repeated blocks (`fold`).

The integer program chooses the split of **roots** only: products, attention, losses, and ops without an operand to
follow. Every other op follows its deepest operand (the one at the end of the longest chain of ops): it is split like
that operand, or stays whole if it cannot be split so. This keeps the integer program small, as in Alpa, but may miss
the optimum; without ``following`` every op is a root. The strategies of a group are those of its root, on each axis

    a split of the root along a label of its dims, or none; and if its outputs are then sums over the ranks, their
    layout after the reduction: whole, or scattered over a dim

A root can be split along every label (dim of the table of placements) that the table does not fix. It can also be split
in the way in which another root, behind views, reads its outputs or makes its inputs: for example the columns of
queries, keys and values as three blocks, or tokens together with samples (`_Splits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from meshwright.cost.op_classes import classify_ops
from meshwright.program.sharding.axis_facts import AxisGraph
from meshwright.program.sharding.dims import OpDims, OpSplit, find_label, gradient_is_sum
from meshwright.program.sharding.propagate import Place
from meshwright.spec import Graph

# (op, position among its inputs)
Slot = tuple[int, int]


# A stack of equal layers is placed as one. A **run** is a number of copies of the same layers, one after the other, in
# which one can stand for another:
#
# - ops at one position of all copies have one cost class: equal kinds, attributes, shapes and roles;
# - every copy reads, position for position, either its own tensors, those of the copy before (**carried**; the first
#   copy reads something from outside instead), parameters of its own, or tensors from outside that all copies share;
# - what comes after the run reads only its last copy.
#
# The first and the last copy choose for themselves, as their neighbours differ. The copies between get the same layout:
# one is kept, each of its ops weighted by the number of copies r, and each `Reading` between two copies (r - 1) times,
# and at the ends once. So the border is periodic: the outputs of a block are converted to the layout that the next one,
# laid out the same, reads. The only assumption is that layouts do not alternate from block to block: such an optimum
# would be missed.
@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRun:
    """A run of equal blocks: ``count`` copies of ``length`` ops, the first of which starts at op ``start``."""

    start: int
    length: int
    count: int

    def copy_of(self, op: int) -> int:
        """Return the index of the copy that contains an op; below 0 or at least ``count`` if the op is outside."""
        return (op - self.start) // self.length

    def __contains__(self, op: object) -> bool:
        return isinstance(op, int) and self.start <= op < self.start + self.length * self.count


class Reading(NamedTuple):
    """A tensor of a kept op, its readers (op, position among the inputs), and how often it occurs in the graph.

    Each of the ``weight`` instances is converted once per layout that readers need.
    """

    tensor: int
    weight: int
    readers: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The result of `fold`: the ops that are kept, each representing itself and equal ops of other blocks.

    ``ops`` are the indexes of the kept ops, ``stands_for`` maps each to all ops that it represents, ``readings`` are
    the readers of their tensors. ``copy_of`` maps every op inside a run to (first op of the run, index of the copy),
    whether the run is folded or not.
    """

    ops: tuple[int, ...]
    stands_for: Mapping[int, tuple[int, ...]] = field(repr=False)
    readings: tuple[Reading, ...]
    copy_of: Mapping[int, tuple[int, int]] = field(repr=False)


def fold(graph: Graph, *, tiled: bool = True) -> Folded:
    """Return the ops to place: of equal blocks in a row, one block between the first and the last; else every op.

    Without ``tiled``, return all ops.
    """
    producer = {tensor: i for i, op in enumerate(graph.ops) for tensor in op.outputs}
    runs = list(_find_runs(graph, producer))
    inside = {op: run for run in runs for op in range(run.start, run.start + run.length * run.count)}
    folding = [_without_ends(run) for run in runs if tiled]
    run_of = {op: run for run in folding for op in range(run.start, run.start + run.length * run.count)}
    ops = tuple(i for i in range(len(graph.ops)) if i not in run_of or run_of[i].copy_of(i) == 0)
    same = {i: tuple(range(i, i + run_of[i].length * run_of[i].count, run_of[i].length)) for i in ops if i in run_of}
    return Folded(
        ops=ops,
        stands_for={i: same.get(i, (i,)) for i in ops},
        readings=tuple(_readings(graph, ops, run_of, producer)),
        copy_of={i: (run.start, run.copy_of(i)) for i, run in inside.items()},
    )


def _without_ends(run: RepeatedRun) -> RepeatedRun:
    """Return the copies between the first and the last one, whose neighbours differ."""
    return RepeatedRun(start=run.start + run.length, length=run.length, count=max(run.count - 2, 0))


def _find_runs(graph: Graph, producer: Mapping[int, int]) -> Iterator[RepeatedRun]:
    """Yield runs in order; each is the one that folds the most ops among those that start at its layer."""
    blocks = [layer.block or f"layer {i}" for i, layer in enumerate(graph.layers)]
    at = 0
    while at < len(blocks):
        periods = range(1, (len(blocks) - at) // 2 + 1)
        repeated = ((period, _repeats(blocks, at, period)) for period in periods)
        runs = [(_run(graph, at, period, count), period * count) for period, count in repeated if count > 1]
        runs.sort(key=lambda found: -found[0].length * (found[0].count - 1))
        run, step = next((found for found in runs if _can_fold(graph, found[0], producer)), (None, 1))
        if run is not None:
            yield run
        at += step


def _repeats(blocks: list[str], at: int, period: int) -> int:
    count = 1
    while blocks[at : at + period] == blocks[at + count * period : at + (count + 1) * period]:
        count += 1
    return count


def _run(graph: Graph, at: int, period: int, count: int) -> RepeatedRun:
    start, stop = graph.layers[at].start, graph.layers[at + period - 1].stop
    return RepeatedRun(start=start, length=stop - start, count=count)


def _can_fold(graph: Graph, run: RepeatedRun, producer: Mapping[int, int]) -> bool:
    """Return whether one copy can stand for all of the run."""
    stop = run.start + run.length * run.count
    classes = classify_ops(graph).class_of[run.start : stop].reshape(run.count, run.length)
    if (classes != classes[0]).any():
        return False
    wirings = [list(_wiring(graph, run, copy, producer)) for copy in range(run.count)]
    if any(a != b for a, b in pairwise(wirings[1:])) or not _begins(wirings[0], wirings[1]):
        return False
    inside = range(run.start, stop - run.length)
    behind = (tensor for op in graph.ops[stop:] for tensor in op.inputs)
    return not any(producer.get(tensor) in inside for tensor in behind) and not _shares_parameters(graph, run)


# The source of an op's input: ("own", output and op in its copy), ("carried", the same in the copy before),
# ("parameter", which of its copy), ("outside", tensor); ("no", copy) cannot be folded.
_Source = tuple[object, ...]


def _wiring(graph: Graph, run: RepeatedRun, copy: int, producer: Mapping[int, int]) -> Iterator[_Source]:
    base = run.start + copy * run.length
    parameters: dict[int, int] = {}
    for op in graph.ops[base : base + run.length]:
        for tensor in op.inputs:
            made = producer.get(tensor)
            if made is not None and made in run:
                source = graph.ops[made].outputs.index(tensor), (made - run.start) % run.length
                behind = copy - run.copy_of(made)
                yield ("own", *source) if behind == 0 else ("carried", *source) if behind == 1 else ("no", copy)
            elif graph.tensors[tensor].role == "parameter":
                yield "parameter", parameters.setdefault(tensor, len(parameters))
            else:
                yield "outside", tensor


def _shares_parameters(graph: Graph, run: RepeatedRun) -> bool:
    """Return whether a copy shares a parameter with other readers: its gradient is summed once for all of them."""
    reader: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        copy = run.copy_of(index) if index in run else -1
        for tensor in op.inputs:
            shared = reader.setdefault(tensor, copy) != copy
            if shared and graph.tensors[tensor].role == "parameter":
                return True
    return False


def _begins(first: list[_Source], second: list[_Source]) -> bool:
    """Return whether the first copy reads like the second, with outside tensors instead of carried ones."""
    return len(first) == len(second) and all(
        a == b or (b[0] == "carried" and a[0] == "outside") for a, b in zip(first, second, strict=True)
    )


def _readings(
    graph: Graph, ops: tuple[int, ...], run_of: Mapping[int, RepeatedRun], producer: Mapping[int, int]
) -> Iterator[Reading]:
    own: dict[int, list[Slot]] = {}
    carried: dict[int, list[Slot]] = {}
    outside: dict[int, list[Slot]] = {}
    for index in ops:
        run = run_of.get(index)
        for position, tensor in enumerate(graph.ops[index].inputs):
            made = producer.get(tensor, -1)
            slot = (index, position)
            if run is not None and (made in run or graph.tensors[tensor].role == "parameter"):
                own.setdefault(tensor, []).append(slot)
                continue
            outside.setdefault(_stand_in(graph, run_of, made, tensor), []).append(slot)
            if run is not None:
                after = graph.ops[index + run.length].inputs[position]
                if after != tensor:
                    carried.setdefault(_stand_in(graph, run_of, producer[after], after), []).append(slot)
    for tensor in dict.fromkeys((*own, *carried, *outside)):
        inner, next_, last = (tuple(found.get(tensor, ())) for found in (own, carried, outside))
        at = producer.get(tensor, inner[0][0] if inner else -1)
        count = run_of[at].count if at in run_of else 1
        if count == 1 or not (next_ or last):
            yield Reading(tensor, count, (*inner, *last))
        else:
            yield from (Reading(tensor, n, r) for n, r in ((count - 1, inner + next_), (1, inner + last)) if r)


def _stand_in(graph: Graph, run_of: Mapping[int, RepeatedRun], made: int, tensor: int) -> int:
    """Return the tensor of the first copy that stands for one of a later copy."""
    run = run_of.get(made)
    if run is None:
        return tensor
    return graph.ops[made - run.copy_of(made) * run.length].outputs[graph.ops[made].outputs.index(tensor)]


# What an axis may split: anything; only samples, as replicas do; anything but samples.
AxisUse = Literal["any", "samples", "model"]
ATTENTION = "aten.scaled_dot_product_attention"


class RootSplit(NamedTuple):
    """The split of a root op on one axis (None: not split).

    ``scatter``: if the outputs are partial sums over the ranks, the place over which they are reduce-scattered; None:
    they are all-reduced.
    """

    split: OpSplit | None
    scatter: Place = None


class Want(NamedTuple):
    """The layout in which an op reads a tensor on one axis (``place``; None: whole).

    ``sums``: each rank computes only a partial sum of the tensor's gradient.
    """

    place: Place
    sums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Ops that are split together, the root first.

    ``choices`` are the possible splits of the root, per axis. ``splits`` maps each op to its split under each of these
    choices, per axis.
    """

    ops: tuple[int, ...]
    choices: tuple[tuple[RootSplit, ...], ...]
    splits: tuple[dict[int, tuple[OpSplit | None, ...]], ...]


class AxisModel:
    """How the kept ops of a graph can be split on one mesh axis of ``size`` ranks.

    ``following``: ops that are not roots are split like one of their operands.
    """

    def __init__(self, graph: Graph, folded: Folded, size: int, *, following: bool = True) -> None:
        self.graph, self.folded, self.following = graph, folded, following
        self.facts = AxisGraph(graph, size)
        self.size = size

    @cached_property
    def free(self) -> frozenset[int]:
        """Tensors that every rank can make or load in any layout: inputs, buffers, and values without a gradient."""
        tensors = self.graph.tensors
        found = {i for i, tensor in enumerate(tensors) if tensor.role in ("input", "buffer", "constant")}
        for index in self.folded.ops:
            op = self.graph.ops[index]
            trained = self.graph.mode == "training" and any(tensors[i].requires_grad for i in op.outputs)
            if all(i in found for i in op.inputs) and not trained:
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def followed(self) -> dict[int, int]:
        """A dict from each op that is not a root to the position of the input that it follows."""
        depth: dict[int, int] = {}
        found: dict[int, int] = {}
        copy_of, producer = self.folded.copy_of, self.facts.producer
        for index in self.folded.ops:
            op, copy = self.graph.ops[index], copy_of.get(index)
            # Blocks are split independently, because one of them may stand for all.
            inside = [at for at, i in enumerate(op.inputs) if i in depth and copy_of.get(producer[i]) == copy]
            operands = [(depth[op.inputs[at]], -at) for at in inside]
            depth |= dict.fromkeys(op.outputs, 1 + max(operands, default=(0, 0))[0])
            if operands and self.following and not self.is_root(index):
                found[index] = -max(operands)[1]
            elif self.is_free(index):
                for output in op.outputs:
                    del depth[output]
        return found

    def is_free(self, index: int) -> bool:
        """Return whether all outputs of an op are in `free`."""
        return all(i in self.free for i in self.graph.ops[index].outputs)

    def is_root(self, index: int) -> bool:
        """Return whether an op is a root by its kind.

        Roots are products, attention, ops that sum over a dim that can be split, and ops with collectives inside.
        """
        dims, row = self.facts.dims[index], self.facts.rows[index]
        product = row is not None and row.product
        sums = any(not dims.in_outputs(label) for label, _ in _labels(dims) if label not in dims.fixed)
        return product or sums or bool(dims.inner) or self.graph.ops[index].kind.startswith(ATTENTION)

    def outputs(self, index: int, choice: RootSplit) -> Iterator[tuple[int, Place]]:
        """Yield each output of an op with the place at which ``choice`` splits it (None: whole)."""
        dims = self.facts.dims[index]
        summed = self.sums_outputs(index, choice.split)
        for tensor, item in zip(self.graph.ops[index].outputs, dims.outputs, strict=True):
            yield tensor, choice.scatter if summed else dims.place_in(item, choice.split)

    def sums_outputs(self, index: int, split: OpSplit | None) -> bool:
        """Return whether an op under a split leaves partial sums on the ranks, which must be added up."""
        dims = self.facts.dims[index]
        return split is not None and not dims.in_outputs(split.label) and split.label not in dims.inner

    def want(self, index: int, position: int, split: OpSplit | None) -> Want:
        """Return the layout in which an op under a split reads its input at ``position``."""
        facts, row = self.facts, self.facts.rows[index]
        dims, tensor = facts.dims[index], facts.graph.ops[index].inputs[position]
        product = row is not None and row.product
        sums = facts.requires_gradient(tensor) and gradient_is_sum(dims, position, split, product=product)
        return Want(dims.place_in(dims.inputs[position], split), sums)

    def reads(self, index: int, position: int) -> bool:
        """Return whether an op reads the values of its input at ``position``, rather than only its dtype or shape."""
        row = self.facts.rows[index]
        return row is None or position < row.reads

    def cuts_samples(self, tensor: int, place: Place) -> bool:
        """Return whether splitting a tensor at a place gives different samples to different ranks."""
        return (
            place is not None
            and bool(self.graph.tensors[tensor].shape[place[0]].per_sample)
            and place[1] % self.facts.samples != 0
        )

    def tensors(self, index: int) -> Iterator[tuple[int, tuple[tuple[tuple[str, int], ...], ...]]]:
        """Yield the inputs and outputs of an op, each with its labelled dims."""
        op, dims = self.graph.ops[index], self.facts.dims[index]
        return zip((*op.inputs, *op.outputs), (*dims.inputs, *dims.outputs), strict=True)


def find_groups(models: Sequence[AxisModel], uses: Sequence[AxisUse]) -> list[OpGroup]:
    """Return all groups of ops, in the order of their roots.

    ``models`` and ``uses`` have one item per axis: how ops can be split there, and what the axis may split.
    """
    followed = models[0].followed
    members: dict[int, list[int]] = {}
    root_of: dict[int, int] = {}
    for index in models[0].folded.ops:
        op = models[0].graph.ops[index]
        if index in followed:
            root = root_of[op.inputs[followed[index]]]
        elif models[0].is_free(index):
            continue
        else:
            root = index
        members.setdefault(root, []).append(index)
        root_of |= dict.fromkeys(op.outputs, root)
    per_axis = [_choices(model, list(members), use) for model, use in zip(models, uses, strict=True)]
    found = []
    for root, ops in members.items():
        choices = tuple(chosen[root] for chosen in per_axis)
        splits = tuple(_follow(model, ops, chosen) for model, chosen in zip(models, choices, strict=True))
        found.append(OpGroup(ops=tuple(ops), choices=choices, splits=splits))
    return found


def _follow(
    model: AxisModel, ops: Sequence[int], choices: Sequence[RootSplit]
) -> dict[int, tuple[OpSplit | None, ...]]:
    """Return the split of each op of a group for each choice of its root."""
    table: dict[int, list[OpSplit | None]] = {index: [] for index in ops}
    for choice in choices:
        lies: dict[int, Place] = {}
        for index in ops:
            if index == ops[0]:
                own = choice
            else:
                position = model.followed[index]
                place = lies[model.graph.ops[index].inputs[position]]
                dims = model.facts.dims[index]
                split = dims.split_at(dims.inputs[position], place) if place else None
                own = RootSplit(split if split and model.facts.can_split(index, split) else None)
            table[index].append(own.split)
            lies |= dict(model.outputs(index, own))
    return {index: tuple(splits) for index, splits in table.items()}


def _choices(model: AxisModel, roots: Sequence[int], use: AxisUse) -> dict[int, tuple[RootSplit, ...]]:
    if model.size == 1:
        return {root: (RootSplit(None),) for root in roots}
    splits = _Splits(model, roots)
    found = {}
    for root in roots:
        choices = [RootSplit(None)]
        for split in splits.of[root]:
            places: Iterable[Place] = (None,)
            outputs = model.graph.ops[root].outputs
            if model.sums_outputs(root, split) and len(outputs) == 1:
                places = (None, *splits.places(outputs[0]))
            choices += [RootSplit(split, place) for place in places]
        allowed = [choice for choice in choices if _is_allowed(model, root, choice, use)]
        found[root] = tuple(allowed or [RootSplit(None)])
    return found


def _is_allowed(model: AxisModel, root: int, choice: RootSplit, use: AxisUse) -> bool:
    if use == "any":
        return True
    dims = model.facts.dims[root]
    lies = [(tensor, dims.place_in(item, choice.split)) for tensor, item in model.tensors(root)]
    cuts = any(model.cuts_samples(*item) for item in (*lies, *model.outputs(root, choice)))
    if use == "model":
        return not cuts
    batched = any(extent.per_sample for tensor, _ in lies for extent in model.graph.tensors[tensor].shape)
    scattered = choice.scatter is not None
    return not scattered and (cuts if batched else choice.split is None)


class _Splits:
    """The splits of all ops: those that roots can choose, carried along views to other ops and back."""

    def __init__(self, model: AxisModel, roots: Sequence[int]) -> None:
        self.model = model
        self.of: dict[int, dict[OpSplit, None]] = {index: {} for index in model.folded.ops}
        self._touching: dict[int, list[tuple[int, int | None]]] = {}
        for index in model.folded.ops:
            for tensor in model.graph.ops[index].outputs:
                self._touching.setdefault(tensor, []).append((index, None))
        for reading in model.folded.readings:
            if not model.facts.is_parameter(reading.tensor):
                readers = [slot for slot in reading.readers if model.reads(*slot)]
                self._touching.setdefault(reading.tensor, []).extend(readers)
        self._tensors_at = self._slots()
        queue = [(root, OpSplit(label)) for root in roots for label, _ in _labels(model.facts.dims[root])]
        while queue:
            index, split = queue.pop()
            if split in self.of[index] or not model.facts.can_split(index, split):
                continue
            self.of[index][split] = None
            queue.extend(self._beside(index, split))

    def places(self, tensor: int) -> tuple[Place, ...]:
        """Return the places (dim, number of blocks) at which readers of a tensor can read it split."""
        found: dict[Place, None] = {}
        for index, position in self._touching[tensor]:
            if position is not None:
                dims = self.model.facts.dims[index]
                found |= dict.fromkeys(dims.place_in(dims.inputs[position], split) for split in self.of[index])
        return tuple(place for place in found if place is not None)

    def _slots(self) -> dict[tuple[int, int], list[int]]:
        """Return the tensors that an op may read at a position; in a run, also the value passed by the copy before."""
        found: dict[tuple[int, int], list[int]] = {}
        for tensor, touching in self._touching.items():
            for index, position in touching:
                if position is not None:
                    found.setdefault((index, position), []).append(tensor)
        return found

    def _beside(self, index: int, split: OpSplit) -> Iterator[tuple[int, OpSplit]]:
        """Yield the splits of other ops that give a tensor of this op the same layout."""
        op, dims = self.model.graph.ops[index], self.model.facts.dims[index]
        lies = list(zip(([i] for i in op.outputs), dims.outputs, strict=True))
        lies += [(self._tensors_at.get((index, at), []), item) for at, item in enumerate(dims.inputs)]
        for tensors, item in lies:
            place = dims.place_in(item, split)
            for tensor in tensors if place else ():
                for other, position in self._touching.get(tensor, ()):
                    if place and (found := self._split_at(other, position, tensor, place)):
                        yield other, found

    def _split_at(self, index: int, position: int | None, tensor: int, place: tuple[int, int]) -> OpSplit | None:
        dims = self.model.facts.dims[index]
        if position is not None:
            return dims.split_at(dims.inputs[position], place)
        return dims.split_at(dims.outputs[self.model.graph.ops[index].outputs.index(tensor)], place)


def _labels(dims: OpDims) -> dict[tuple[str, int], None]:
    """Return labels of an op with the parts before them, in the order of their first occurrence."""
    found: dict[str, int] = {}
    for item in (*dims.outputs, *dims.inputs):
        for factors in item:
            for label, _ in factors:
                place = find_label(item, label)
                assert place is not None
                found.setdefault(label, place[1])
    return dict.fromkeys(found.items())
