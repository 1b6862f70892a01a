"""Group the ops of a graph into FlexFlow's layers, and find the SOAP dims along which each layer can be split.

A layer is a computing op (product, convolution, pool, loss, ...) and the ops after it that have no FLOPs and keep all
dims along which the layer can be split. Ops that can only be placed together (`find_tasks`) are in one layer. An op can
be split along the dims that the sharding table (`placements.toml`) gives, and in addition:

- convolutions and pools along their spatial dims; parts then also read the borders of their neighbours (`windows`);
- batch norm along all dims; statistics are then those of one part, as in data parallelism.

A dim of an op is a **sample** dim if it grows with the batch, a **parameter** dim if a parameter of the op also has it,
and an **attribute** dim otherwise (Jia et al. 2019, table 1). A layer can be split along a dim only if that splits all
tensors that other layers read. Each dim of a tensor belongs to at most one SOAP dim.

``can_run`` leaves out dims along which parts cannot run as separate ops (`lowering`): those of sliding windows, of
random ops, of queries under a causal mask, and sums that are neither a mean nor a classification loss.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from meshwright.planner.placing.op_tasks import find_tasks
from meshwright.program.sharding.axis_facts import AxisGraph
from meshwright.program.sharding.dims import OpDims, OpSplit, find_label
from meshwright.program.sharding.op_signatures import Dims, OpSignature, Shape, one
from meshwright.program.sharding.placement_table import operator_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.spec import Graph, Op

Kind = Literal["sample", "attribute", "parameter"]
Place = tuple[int, int]
# Stride, how far a window begins before its place, and its width.
Window = tuple[int, int, int]

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_POOLS = ("max_pool2d", "avg_pool2d")
_PLACE: Place = (-1, 1)


@dataclass(slots=True, kw_only=True)
class SoapDim:
    """One dim along which a layer can be split, into any number of parts that divides ``size``.

    ``places`` maps each tensor that is split to (its dim, number of equal blocks in that dim that are each split).
    ``windows`` maps each input of which a part also reads a border to (stride, padding before, width). ``ops`` are the
    ops that are split.
    """

    kind: Kind
    size: int
    places: dict[int, Place] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    ops: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class SoapLayer:
    """Ops (ids, ascending) that are split alike, and the SOAP dims along which they can be split."""

    name: str
    ops: list[int]
    dims: list[SoapDim]


def find_layers(graph: Graph, batch_size: int, *, can_run: bool = False) -> list[SoapLayer]:
    """Return the layers of a graph in topological order, with the SOAP dims along which each can be split.

    ``can_run``: leave out dims along which the parts cannot run as separate ops.
    """
    reader = _Reader(graph, batch_size, can_run)
    layers: list[SoapLayer] = []
    home: dict[int, int] = {}
    for ops in _topological(graph):
        sources = {home[op] for op in reader.makers_of(ops)}
        is_apart = not sources and not any(t in reader.facts.readers for op in ops for t in graph.ops[op].outputs)
        at = len(layers)
        if is_apart and layers and not any(graph.ops[op].flops.at(batch_size) for op in ops):
            at -= 1
            layers[at].ops += ops
        elif sources and reader.follows(layers[max(sources)], ops):
            at = max(sources)
        else:
            layers.append(reader.begin(ops))
        home.update(dict.fromkeys(ops, at))
    for layer in layers:
        layer.ops.sort()
    _keep_what_goes_on(graph, layers, home)
    return layers


def _topological(graph: Graph) -> Iterator[tuple[int, ...]]:
    """Tasks, each after all that it reads."""
    tasks = find_tasks(graph)
    missing = [len({source for source, _ in reads}) for reads in tasks.reads]
    readers, ready = tasks.readers(), [task for task, count in enumerate(missing) if not count]
    while ready:
        task = min(ready, key=lambda task: tasks.ops[task][0])
        ready.remove(task)
        yield tasks.ops[task]
        for other in readers[task]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)


class _Reader:
    """Reads the dims of the ops of one graph."""

    def __init__(self, graph: Graph, batch_size: int, can_run: bool) -> None:
        self.graph, self.batch_size, self.facts, self.can_run = graph, batch_size, AxisGraph(graph, 1), can_run
        self.placed = {op for op, item in enumerate(graph.ops) if not item.replicable}

    def makers_of(self, ops: tuple[int, ...]) -> set[int]:
        """Return the placed ops that make the inputs of ``ops``, without ``ops`` themselves."""
        inputs = {tensor for op in ops for tensor in self.graph.ops[op].inputs}
        return {made for t in inputs if (made := self.facts.producer.get(t)) in self.placed and made not in ops}

    def begin(self, ops: tuple[int, ...]) -> SoapLayer:
        """Return a new layer with the ops of a task; its dims are those of the op with the most FLOPs."""
        main = max(ops, key=lambda op: (self.graph.ops[op].flops.at(self.batch_size), -op))
        dims, windows = self.dims_of(main)
        layer = SoapLayer(name=self.graph.ops[main].module or self.graph.ops[main].name, ops=[main], dims=[])
        for label in _labels(dims, is_sink=not any(t in self.facts.readers for t in self.graph.ops[main].outputs)):
            made = self.as_soap(main, dims, label, windows)
            if not self.can_run or self.runs(main, made):
                layer.dims.append(made)
        layer.dims.sort(key=lambda dim: ("sample", "attribute", "parameter").index(dim.kind))
        for op in sorted(set(ops) - {main}):
            layer.dims = [dim for dim in layer.dims if self.carry(dim, op)]
            layer.ops.append(op)
        return layer

    def follows(self, layer: SoapLayer, ops: tuple[int, ...]) -> bool:
        """Add the ops of a task to a layer if they have no FLOPs and keep all dims; return whether they were added."""
        items = [self.graph.ops[op] for op in ops]
        if any(item.flops.at(self.batch_size) or operator_name(item.kind) in _POOLS for item in items):
            return False
        if self.can_run and any(item.random for item in items):
            # Numbers are drawn in the graph's order, and a layer computes all of its ops at its own place.
            return False
        made = [tensor for item in items for tensor in item.outputs]
        if not any(dim.kind == "sample" for dim in layer.dims) and any(map(self.facts.depends_on_batch, made)):
            return False
        tried = [
            SoapDim(kind=d.kind, size=d.size, places=dict(d.places), windows=d.windows, ops=set(d.ops))
            for d in layer.dims
        ]
        if not all(self.carry(dim, op) for op in ops for dim in tried):
            return False
        layer.dims, layer.ops = tried, [*layer.ops, *ops]
        return True

    def carry(self, dim: SoapDim, op: int) -> bool:
        """Extend a dim of a layer to a further op; return False if the op's inputs or outputs cannot be split so."""
        item, (dims, _) = self.graph.ops[op], self.dims_of(op)
        if self.can_run and not _is_plain(item):
            return False
        placed = [(dims.inputs[k], dim.places[t]) for k, t in enumerate(item.inputs) if t in dim.places]
        if not placed:
            return not any(made in dim.ops for made in self.makers_of((op,)))
        split = dims.split_at(*placed[0])
        if split is None or any(dims.place_in(inputs, split) != place for inputs, place in placed):
            return False
        made = [dims.place_in(outputs, split) for outputs in dims.outputs]
        size = self.label_size(dims, split.label)
        if None in made or size is None:
            return False
        dim.size = math.gcd(dim.size, size)
        self.note(dim, op, dims, split)
        return True

    def runs(self, op: int, dim: SoapDim) -> bool:
        """Return whether torch's operator on slices of its tensors computes the parts of a layer's main op."""
        item = self.graph.ops[op]
        if not _is_plain(item) or dim.windows:
            return False
        if operator_name(item.kind) == "scaled_dot_product_attention" and "is_causal" in dict(item.attributes):
            return dim.places.get(item.inputs[0], _PLACE)[0] != len(self.graph.tensors[item.inputs[0]].shape) - 2
        is_summed = not any(tensor in dim.places for tensor in item.outputs)
        return not is_summed or sums_of(self.graph, item) is not None

    def as_soap(self, op: int, dims: OpDims, label: str, windows: dict[str, Window]) -> SoapDim:
        """Return the SOAP dim for a label of a layer's main op."""
        parameters = [
            dims.inputs[k] for k, t in enumerate(self.graph.ops[op].inputs) if self.graph.tensors[t].role == "parameter"
        ]
        kind: Kind = "attribute"
        if self.is_batch(op, dims, label):
            kind = "sample"
        elif any(find_label(inputs, label) for inputs in parameters):
            kind = "parameter"
        made = SoapDim(kind=kind, size=self.label_size(dims, label) or 1)
        self.note(made, op, dims, OpSplit(label), slides=label in windows)
        if label in windows:
            made.windows = {t: windows[label] for t in self.graph.ops[op].inputs if t in made.places}
        return made

    def note(self, dim: SoapDim, op: int, dims: OpDims, split: OpSplit, *, slides: bool = False) -> None:
        """Record in ``dim`` which tensors of an op a split divides, and limit ``dim.size`` to divisors of their sizes.

        Sizes along sliding windows set no limit.
        """
        item = self.graph.ops[op]
        dim.ops.add(op)
        for tensor, labelled in zip((*item.inputs, *item.outputs), (*dims.inputs, *dims.outputs), strict=True):
            place = dims.place_in(labelled, split)
            if place is not None:
                dim.places.setdefault(tensor, place)
                if not slides:
                    whole = self.graph.tensors[tensor].shape[place[0]].at(self.batch_size)
                    dim.size = math.gcd(dim.size, whole // place[1])

    def is_batch(self, op: int, dims: OpDims, label: str) -> bool:
        """Return whether a label is the batch dim: its size grows with the batch size.

        In a graph of fixed sizes: whether it is the first dim of a tensor and has the batch size.
        """
        item = self.graph.ops[op]
        for tensor, labelled in zip((*item.outputs, *item.inputs), (*dims.outputs, *dims.inputs), strict=True):
            found = find_label(labelled, label)
            if found is not None and self.graph.batch_size is None:
                return (
                    bool(self.graph.tensors[tensor].shape[found[0]].per_sample) and found[2] % self.facts.samples == 0
                )
            if found is not None:
                return found[0] == 0 and found[2] == self.graph.batch_size
        return False

    def label_size(self, dims: OpDims, label: str) -> int | None:
        """Return the number that the degree of a label must divide: its size, or the batch size if it is the batch.

        Returns None if no tensor of the op has the label.
        """
        for labelled in (*dims.outputs, *dims.inputs):
            found = find_label(labelled, label)
            if found is not None:
                grows = self.graph.batch_size is None and found[2] % self.facts.samples == 0
                return self.batch_size if grows else found[2]
        return None

    def dims_of(self, op: int) -> tuple[OpDims, dict[str, Window]]:
        """Return the labelled dims of an op, and the windows of the labels along which a window slides."""
        item = self.graph.ops[op]
        shapes = [tuple(self.facts.shapes[t] for t in tensors) for tensors in (item.inputs, item.outputs)]
        call = OpSignature(operator_name(item.kind), dict(item.attributes), *shapes)
        if call.operator == "batch_norm":
            channels = (one("d1", call.inputs[0][1]),)
            rest = tuple(channels if len(shape) == 1 else () for shape in call.inputs[1:])
            dims = _numbered(call.inputs[0])
            return OpDims((dims, *rest), (_numbered(call.outputs[0]),)), {}
        if call.operator in (*_CONVOLUTIONS, *_POOLS):
            return _slide(call) or (self.facts.dims[op], {})
        return self.facts.dims[op], {}


def _is_plain(op: Op) -> bool:
    """Whether torch's operator computes the op from its tensors alone."""
    return op.kind.startswith("aten.") and not op.random


def sums_of(graph: Graph, op: Op) -> Literal["mean", "classes"] | None:
    """Return how to combine the scalar results of an op's equal parts into its result; None if that is impossible.

    "mean": the mean of the results. "classes": their sum divided by the number of targets that are not ignored.
    """
    name, attributes = operator_name(op.kind), dict(op.attributes)
    if attributes.get("reduction", "1") != "1" or len(op.outputs) != 1 or graph.tensors[op.outputs[0]].shape:
        return None
    if name == "mse_loss" or (name == "mean" and len(op.inputs) == 1):
        return "mean"
    is_of_classes = name == "cross_entropy_loss" and len(op.inputs) == 2 and "label_smoothing" not in attributes
    return "classes" if is_of_classes and graph.tensors[op.inputs[1]].dtype == "int64" else None


def _numbered(shape: Shape) -> Dims:
    return tuple(one(f"d{k}", size) for k, size in enumerate(shape))


def _labels(dims: OpDims, *, is_sink: bool) -> list[str]:
    """Labels along which an op can be split: of its outputs; of what it sums up where nothing reads the sum."""
    tensors = dims.inputs if is_sink and not any(dims.outputs) else dims.outputs
    found = {label: None for labelled in tensors for factors in labelled for label, _ in factors}
    return [label for label in found if label not in dims.fixed | dims.inner]


def _slide(call: OpSignature) -> tuple[OpDims, dict[str, Window]] | None:
    """Dims of what a window slides over; None if attributes say something else than numbers."""
    given, made = call.inputs[0], call.outputs[0]
    rank = len(given) - 2
    is_pool = call.operator in _POOLS
    kernel = _listed(call, "kernel_size", rank, None) if is_pool else list(call.inputs[1][2:])
    stride = _listed(call, "stride", rank, kernel if is_pool else [1] * rank)
    padding, dilation = _listed(call, "padding", rank, [0] * rank), _listed(call, "dilation", rank, [1] * rank)
    if kernel is None or stride is None or padding is None or dilation is None or len(given) != len(made):
        return None
    places = [f"p{k}" for k in range(rank)]
    windows: dict[str, Window] = {
        place: (stride[k], padding[k], (kernel[k] - 1) * dilation[k] + 1) for k, place in enumerate(places)
    }
    grouped = call.number("groups", 1) != 1
    channels = ("c", "c") if is_pool else ("Xi", "Xo") if grouped else ("i", "o")
    source = (one("b", given[0]), one(channels[0], given[1]), *map(one, places, given[2:]))
    target = (one("b", made[0]), one(channels[1], made[1]), *map(one, places, made[2:]))
    inputs: list[Dims] = [source]
    if not is_pool:
        weight = call.inputs[1]
        own = tuple(one(f"Xk{k}", size) for k, size in enumerate(weight[2:]))
        inputs += [(one(channels[1], weight[0]), one(channels[0] if not grouped else "Xg", weight[1]), *own)]
        inputs += [(one(channels[1], shape[0]),) for shape in call.inputs[2:]]
    fixed = frozenset(
        label for labelled in (*inputs, target) for dim in labelled for label, _ in dim if label[0] == "X"
    )
    return OpDims(tuple(inputs), (target,), fixed), windows


def _listed(call: OpSignature, name: str, rank: int, default: list[int] | None) -> list[int] | None:
    """An attribute that is a number for each place, or one for all; None for a word."""
    text = call.attributes.get(name)
    if text is None:
        return default
    found = call.numbers(name)
    if not found and re.search(r"[a-z]", text):
        return None
    return (found * rank if len(found) == 1 else found) or default


def _keep_what_goes_on(graph: Graph, layers: list[SoapLayer], home: dict[int, int]) -> None:
    """Drop the dims of a layer along which something that others read is not split, or only in parts of a dim."""
    handed: list[set[int]] = [set() for _ in layers]
    maker = {tensor: op for op in home for tensor in graph.ops[op].outputs}
    for op, at in home.items():
        for tensor in graph.ops[op].inputs:
            if tensor in maker and home[maker[tensor]] != at:
                handed[home[maker[tensor]]].add(tensor)
    # Parts of a loss are summed; other outputs are put together from runs of a dim, as what layers read is.
    for tensor in () if graph.has_loss else graph.outputs:
        if tensor in maker:
            handed[home[maker[tensor]]].add(tensor)
    for layer, tensors in zip(layers, handed, strict=True):
        kept: list[SoapDim] = []
        for dim in layer.dims:
            places = [dim.places.get(tensor) for tensor in tensors]
            taken = any(other.places[t][0] == dim.places[t][0] for other in kept for t in tensors if t in dim.places)
            if dim.size > 1 and not taken and all(place is not None and place[1] == 1 for place in places):
                kept.append(dim)
        layer.dims = kept
