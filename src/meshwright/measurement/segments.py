"""Segments: runnable parts of a captured graph with real tensors, whose ops are timed, and the key of each op.

A model that fits in memory is one segment, so that the caches are in the same state as in a real step. For a larger
model, each layer that contains an op not yet covered is a segment, so equal layers are measured once.

The functions that cut a graph and make batches are arguments (`OpSource`), because this package may not import
`capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.spec import Graph, MeasurementError, StageSlice, Tensor, op_key, slice_graph

# cut(feeds, fetches, ops, batch_size): the runnable part of the graph, its nodes named like the ops.
Cut = Callable[[tuple[int, ...], tuple[int, ...], tuple[int, ...], int], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSource:
    """A captured model with the functions that are needed to time its ops.

    ``cut(feeds, fetches, ops, batch_size)``: returns the runnable part of the graph with these ops. ``batch(n)``:
    returns the tensors of ``graph.inputs`` for n samples.
    """

    graph: Graph
    cut: Cut
    batch: Callable[[int], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A runnable part of a captured graph.

    ``feeds``: the arguments of ``module``, in order. ``keys``: the key in the measurement table of each node, by name.
    ``differentiable``: for each result, whether its backward starts with a gradient. ``training``: whether it has a
    backward.
    """

    module: fx.GraphModule
    feeds: tuple[torch.Tensor, ...]
    keys: dict[str, str]
    differentiable: tuple[bool, ...]
    training: bool


def build_segments(source: OpSource, batch_size: int, *, max_bytes: int) -> tuple[Segment, ...]:
    """Return segments that contain every distinct op of the graph: the whole model if it needs at most ``max_bytes``.

    Else the segments are layers that together contain every distinct op. Raises GraphError for a batch size that the
    graph does not support, and MeasurementError if these layers need more than ``max_bytes``, too.
    """
    graph = source.graph
    graph.check_batch_size(batch_size)
    whole = slice_graph(graph, [(0, len(graph.layers))])[0]
    if _needed_bytes(graph, whole, batch_size) <= max_bytes:
        return (_segment(source, whole, batch_size),)
    chosen = covering_layers(graph, [op_key(graph, op, batch_size) for op in graph.ops])
    needed = sum(_needed_bytes(graph, stage, batch_size) for stage in chosen)
    if needed > max_bytes:
        raise MeasurementError(
            f"Timing the distinct layers of {graph.name!r} on batches of {batch_size} needs about {needed} bytes of "
            f"memory, but only {max_bytes} bytes may be used. Give a smaller batch, or a smaller model with the same "
            "kinds of layers."
        )
    return tuple(_segment(source, stage, batch_size) for stage in chosen)


def covering_layers(graph: Graph, keys_of_ops: Sequence[str]) -> list[StageSlice]:
    """Return the layers, in order, that contain an op whose key no earlier layer contains.

    ``keys_of_ops``: the key of each op of the graph.
    """
    covered: set[str] = set()
    chosen = []
    for stage in slice_graph(graph, [(i, i + 1) for i in range(len(graph.layers))]):
        keys = {keys_of_ops[i] for i in stage.ops}
        if keys - covered:
            covered |= keys
            chosen.append(stage)
    return chosen


def _needed_bytes(graph: Graph, stage: StageSlice, batch_size: int) -> int:
    """Bytes of parameters, the same again for gradients, buffers, and all values that the ops make and keep."""
    state = sum(graph.tensors[i].num_bytes(batch_size) for i in (*stage.parameters, *stage.parameters, *stage.buffers))
    made = {i for op in stage.ops for i in (*graph.ops[op].outputs, *graph.ops[op].saved)}
    return state + sum(graph.tensors[i].num_bytes(batch_size) for i in made if graph.tensors[i].storage == i)


def _segment(source: OpSource, stage: StageSlice, batch_size: int) -> Segment:
    graph = source.graph
    received = tuple(tensor for channel in stage.incoming for tensor in channel.tensors)
    sent = (tensor for channel in stage.outgoing for tensor in channel.tensors)
    fetches = tuple(dict.fromkeys((*sent, *stage.outputs)))
    module = source.cut((*stage.inputs, *received), fetches, stage.ops, batch_size)
    if not isinstance(module, fx.GraphModule):
        raise MeasurementError(
            f"The part of {graph.name!r} to be timed is a {type(module).__name__}; expected a torch.fx.GraphModule, "
            "whose ops can be run one by one. Pass a `cut` that returns one."
        )
    names = {node.name for node in module.graph.nodes}
    unknown = [graph.ops[i].name for i in stage.ops if graph.ops[i].name not in names]
    if unknown:
        raise MeasurementError(
            f"The part of {graph.name!r} to be timed has no node named {unknown[0]!r}; every op needs a node with its "
            "name, else its time would be counted for another op. Pass a `cut` that names nodes like the ops."
        )
    _materialise(module)
    places = {node.target: node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"}
    given = dict(zip(graph.inputs, source.batch(batch_size), strict=True))
    values = [given[i] for i in stage.inputs]
    values += [
        _invent(graph.tensors[tensor], batch_size, layout)
        for tensor, layout in zip(received, list(places.values())[len(stage.inputs) :], strict=True)
    ]
    training = graph.mode == "training" and stage.has_backward
    return Segment(
        module=module,
        feeds=tuple(values),
        keys={graph.ops[i].name: op_key(graph, graph.ops[i], batch_size) for i in stage.ops},
        differentiable=tuple(training and graph.tensors[i].requires_grad for i in fetches),
        training=training,
    )


def _invent(tensor: Tensor, batch_size: int, layout: torch.Tensor | None) -> torch.Tensor:
    """A plausible value for the input from another layer: noise, or zeros for indices."""
    shape = [extent.at(batch_size) for extent in tensor.shape]
    dtype = getattr(torch, tensor.dtype)
    value = torch.zeros(shape, dtype=dtype)
    if layout is not None:
        value = torch.empty_strided(shape, layout.stride(), dtype=dtype).zero_()
    if not dtype.is_floating_point:
        return value
    return value.normal_().requires_grad_(tensor.requires_grad)


def _materialise(module: nn.Module) -> None:
    """Give unallocated weights real memory and small random values."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if _is_unreal(parameter):
                value = torch.empty(parameter.shape, dtype=parameter.dtype).normal_(std=0.02)
                setattr(owner, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if _is_unreal(buffer):
                setattr(owner, name, torch.ones(buffer.shape, dtype=buffer.dtype))


def _is_unreal(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor) or tensor.is_meta
