"""The distinct ops of a model as single calls on a device, in the types in which a precision computes them.

The model is captured without memory. Keys are those of the measurement table (`cost.work.key_in`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from meshwright.capture import Captured, capture_model, part, strides_of
from meshwright.cost.autocast import as_computed, cast_inputs
from meshwright.cost.classes import classify_ops
from meshwright.cost.conversions import Move, moves_beside, op_type
from meshwright.cost.traits import family_of, operator_name
from meshwright.cost.widths import Widths
from meshwright.cost.work import key_in
from meshwright.measurement import DeviceOp, InputSpec, Segment, covering_layers, make_move, materialised
from meshwright.spec import Graph, Op, StageSlice, load_cluster
from meshwright.spec.precision import Numbers
from meshwright.spec.units import FLOAT_DTYPES
from meshwright.training.measure import Sizes
from meshwright.training.precision import OF_ONE_TYPE
from meshwright.zoo import load_model

# Ops whose second input has indices into the first dim of the first one, and losses whose second input has classes.
_LOOKUPS = ("embedding", "embedding_bag")
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward")
# Ops that read at indices along some dim of their first input.
_PLACES = (
    "gather",
    "index",
    "index_select",
    "take",
    "take_along_dim",
    "scatter",
    "scatter_add",
    "index_add",
    "index_put",
)


def capture_unallocated(reference: str, sizes: Sizes, batch_size: int) -> Captured:
    """The model's training graph without memory for weights; for all batch sizes if possible."""
    options: dict[str, Any] = dict(sizes)
    for size in (None, batch_size):
        source = load_model(reference, batch_size=size, fake=True, **options)
        captured = capture_model(
            source.model, source.inputs, targets=source.targets, loss=source.loss, name=reference, verify=False
        )
        if captured.graph.batch_size in (None, batch_size):
            break
    captured.graph.check_batch_size(batch_size)
    return captured


class ModelOps:
    """The distinct ops of a captured model in a precision, at a batch size, on a device."""

    def __init__(self, captured: Captured, numbers: Numbers, size: int, device: torch.device) -> None:
        self._captured, self._numbers, self._size, self._device = captured, numbers, size, device
        self._graph = graph = as_computed(captured.graph, numbers)
        self._classes = classify_ops(graph)
        width = None if numbers.autocast else numbers.value_bytes
        self._widths = Widths(graph=graph, values=width, single=self._classes.single)
        self._strides = strides_of(captured, size)
        self._bounds = index_bounds(graph, size)
        self._key_of = {i: key_in(op_type(graph, op, numbers), graph, op, size) for i, op in enumerate(graph.ops)}
        self.keys = frozenset(self._key_of.values())

    def ops(self) -> Iterator[DeviceOp]:
        """Each distinct op once, in its most frequent layout."""
        layouts: dict[str, Counter[Any]] = {}
        for i, key in self._key_of.items():
            layout = tuple(self._strides.get(tensor) for tensor in self._graph.ops[i].inputs)
            layouts.setdefault(key, Counter())[layout] += 1
        seen = set()
        for i, key in self._key_of.items():
            layout = tuple(self._strides.get(tensor) for tensor in self._graph.ops[i].inputs)
            if key not in seen and layout == layouts[key].most_common(1)[0][0]:
                seen.add(key)
                yield self._op(i)

    def moves(self, kept: frozenset[str]) -> list[DeviceOp]:
        """Conversions and sums besides the ops, each size once, except those whose keys are ``kept``."""
        kind = load_cluster("H100").device_kinds[0]  # they are the same on every device that computes in the precision
        found: dict[Move, None] = {}
        for place, added in zip(self._classes.representatives, self._classes.added, strict=True):
            op = self._graph.ops[place]
            forward, backward, _ = moves_beside(self._graph, op, self._size, kind, self._numbers, self._widths, added)
            found |= dict.fromkeys((*forward, *backward))
        half = "float16" if self._numbers.compute == "float16" else "bfloat16"
        names = {2: half, 4: "float32", 8: "float64"}
        made = [
            make_move(move.elements, names[move.read], names[move.written], adds=move.adds)
            for move in found
            if move.written in names and move.read in names and move.elements
        ]
        return [op for op in {op.key: op for op in made}.values() if op.key not in kept]

    def surrounding(self) -> AbstractContextManager[Any]:
        """The context in which a forward runs."""
        if not self._numbers.autocast:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self._numbers.autocast))

    def segments(self) -> list[tuple[str, Callable[[], Segment]]]:
        """Layers that together contain every distinct op, by name, as functions that create them one by one."""
        layers = covering_layers(self._graph, [self._key_of[i] for i in range(len(self._graph.ops))])
        return [
            (self._graph.layers[stage.index].name, lambda stage=stage: self._segment(stage))  # type: ignore[misc]
            for stage in layers
        ]

    def _op(self, index: int) -> DeviceOp:
        graph, op = self._graph, self._graph.ops[index]
        inputs = list(dict.fromkeys(op.inputs))
        given = [i for i in inputs if graph.tensors[i].role in ("input", "activation")]
        module = part(self._captured, given, op.outputs, batch_size=self._size, ops=(index,), device=self._device)
        storages = {graph.tensors[i].storage for i in inputs}
        in_place = op.is_in_place
        return DeviceOp(
            key=self._key_of[index],
            module=module,
            feeds=tuple(self._feed(i, self._type_in(op, i)) for i in given),
            state={graph.tensors[i].name: self._type_in(op, i) for i in inputs if i not in given},
            differentiable=tuple(graph.mode == "training" and graph.tensors[i].requires_grad for i in op.outputs),
            is_view=not in_place and all(graph.tensors[i].storage in storages for i in op.outputs),
            is_in_place=in_place,
        )

    def _segment(self, stage: StageSlice) -> Segment:
        graph = self._graph
        received = [tensor for channel in stage.incoming for tensor in channel.tensors]
        sent = (tensor for channel in stage.outgoing for tensor in channel.tensors)
        given, fetches = (*stage.inputs, *received), tuple(dict.fromkeys((*sent, *stage.outputs)))
        module = part(self._captured, given, fetches, batch_size=self._size, ops=stage.ops, device=self._device)
        held = (*stage.parameters, *stage.buffers)
        state = {graph.tensors[i].name: self._type(i) for i in held}
        training = graph.mode == "training" and stage.has_backward
        return Segment(
            module=materialised(module, state, self._device),
            feeds=tuple(self._feed(i, self._type(i)).make(self._device) for i in given),
            keys={graph.ops[i].name: self._key_of[i] for i in stage.ops},
            differentiable=tuple(training and graph.tensors[i].requires_grad for i in fetches),
            training=training,
        )

    def _feed(self, tensor: int, dtype: str) -> InputSpec:
        held = self._graph.tensors[tensor]
        return InputSpec(
            shape=tuple(extent.at(self._size) for extent in held.shape),
            strides=self._strides.get(tensor),
            dtype=dtype,
            requires_grad=held.requires_grad,
            bound=self._bounds.get(tensor, 2),
        )

    def _type_in(self, op: Op, tensor: int) -> str:
        """The type in which an op reads a tensor, after autocast."""
        if self._numbers.autocast and tensor in cast_inputs(self._graph, op, self._numbers.autocast):
            return op_type(self._graph, op, self._numbers)
        dtype = self._type(tensor)
        is_cast = not self._numbers.autocast and family_of(op) in OF_ONE_TYPE and dtype in FLOAT_DTYPES
        return self._numbers.values if is_cast else dtype

    def _type(self, tensor: int) -> str:
        """The type of a tensor in the precision."""
        dtype = self._graph.tensors[tensor].dtype
        if self._numbers.autocast or dtype not in FLOAT_DTYPES or tensor in self._classes.single:
            return dtype
        return self._numbers.values


def index_bounds(graph: Graph, batch_size: int) -> dict[int, int]:
    """Exclusive upper bounds of integer inputs, by tensor, so that no op reads outside of its table."""
    found: dict[int, int] = {}

    def limit(tensor: int, bound: int) -> None:
        found[tensor] = min(found.get(tensor, bound), bound)

    for op in reversed(graph.ops):
        whole = [i for i in op.inputs if graph.tensors[i].dtype not in FLOAT_DTYPES]
        name, first = operator_name(op).rstrip("_"), op.inputs[0] if op.inputs else None
        for i in whole:
            # Values made from integers by views and arithmetic may be indices later.
            for made in op.outputs:
                if made in found and graph.tensors[made].dtype not in FLOAT_DTYPES:
                    limit(i, found[made])
            if first is None or i == first:
                continue
            shape = [extent.at(batch_size) for extent in graph.tensors[first].shape]
            if name in _LOOKUPS and shape:
                limit(i, shape[0])
            elif name in _LOSSES and shape:
                limit(i, shape[1] if len(shape) > 1 else shape[0])
            elif name in _PLACES and shape:
                limit(i, min(shape))
    return found
