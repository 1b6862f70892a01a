"""A model whose layers are split into parts, as FlexFlow's strategies do, as a module whose graph can be placed.

A part computes a slice of a layer's outputs, and is a module of its own (`lowering.part_name`). Tensors that a part
reads from other parts are cut by modules of those parts, and joined by a module of the part. So the captured graph
shows by the modules of its ops which part they belong to. Parameters of parts are slices of the model's parameters, or
the model's own where they are whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.capture import Captured, capture_model, flatten_batch, part, rebuild
from meshwright.planner.methods.flexflow.lowering import (
    Cut,
    Part,
    Read,
    SplitGraph,
    find_pieces,
    part_name,
    split_graph,
)
from meshwright.spec import CaptureError, GraphError, PlanError
from meshwright.zoo import ModelSource

# The largest relative difference from the loss of the model: sums are in another order.
_CLOSE = 1e-3


def split_source(
    source: ModelSource, degrees: Sequence[Sequence[int]], mode: Literal["training", "inference"]
) -> ModelSource:
    """Return the same model with its layers split into parts, for batches of the source's batch size.

    It takes inputs and targets as tensors. ``degrees``: for each layer, the number of parts along each of its dims
    (`planner.methods.flexflow`). Raises CaptureError for a model that cannot be captured, or whose parts compute
    another loss; PlanError for degrees that do not match the layers, or for an op that cannot be split.
    """
    training = mode == "training"
    targets, loss = (source.targets, source.loss) if training else ((), None)
    captured = capture_model(source.model, source.inputs, targets=targets, loss=loss, mode=mode, verify=False)
    split = split_graph(captured.graph, source.batch_size, degrees)
    try:
        model = SplitModel(split, captured)
    except GraphError as error:
        raise PlanError(f"The model's layers cannot be split as the plan says: {error}") from None
    model.train(training)
    inputs = flatten_batch(captured, source.inputs, targets)
    weights = [*source.model.parameters(), *source.model.buffers(), *inputs]
    if training and not any(isinstance(item, FakeTensor) or item.is_meta for item in weights):
        _check_loss(source, model, inputs)
    return replace(source, model=model, inputs=inputs, targets=(), loss=None)


class SplitModel(nn.Module):
    """A model in parts: takes the tensors of a batch (inputs, then targets), and returns the loss, or all outputs."""

    # For `capture_model`.
    takes_one_size = True

    def __init__(self, split: SplitGraph, captured: Captured) -> None:
        super().__init__()
        builder = _Builder(split, captured)
        self.parts = builder.module()
        # Targets are among the tensors that it takes.
        self.takes_targets = captured.graph.has_loss
        self.writes_copies = any(item.copies for items in split.parts for item in items)
        self.draws_random = any(op.random for op in captured.graph.ops)
        self._shares = builder.shares
        held = {name for name, _ in self._shares.values()}
        state = captured.trace.state.items()
        self._unused = {name: value.detach() for name, value in state if name not in held}
        self._shapes = {name: value.shape for name, value in state}
        self._aliases = {alias: name for name, items in captured.trace.aliases.items() for alias in items}

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the loss if the graph has one; else the only output, or a tuple of outputs."""
        made = self.parts(*tensors)
        return made[0] if self.takes_targets or len(made) == 1 else made

    def whole_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state dict of the original model from that of this model, with the slices joined, on the CPU."""
        whole: dict[str, torch.Tensor] = {name: value.cpu().clone() for name, value in self._unused.items()}
        seen = set()
        for key, value in state.items():
            name, cuts = self._shares.get(key, ("", ()))
            if (name, cuts) in seen:
                # A copy of what another part has.
                continue
            seen.add((name, cuts))
            if name and name not in whole:
                whole[name] = torch.empty(self._shapes[name], dtype=value.dtype)
            elif not name or not cuts:
                continue
            _take(whole[name], cuts).copy_(value.reshape(_take(whole[name], cuts).shape))
        return whole | {alias: whole[name] for alias, name in self._aliases.items() if name in whole}


class PartOps(nn.Module):
    """The ops of a part, as a module around their graph module.

    Exported ops are named after the module that they come from, but not after a graph module.
    """

    def __init__(self, ops: fx.GraphModule) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the part."""
        made: tuple[torch.Tensor, ...] = self.ops(*given)
        return made


class Take(nn.Module):
    """Cuts a slice out of a tensor; ``ends`` has (dim, start, length) for each dim that is narrowed."""

    def __init__(self, ends: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        self._ends = tuple(ends)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the slice, as a view."""
        for dim, start, length in self._ends:
            value = value.narrow(dim, start, length)
        return value


class Join(nn.Module):
    """Joins the pieces of a tensor; ``places`` has for each piece its index along each dim."""

    def __init__(self, places: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self._places = tuple(places)

    def forward(self, *pieces: torch.Tensor) -> torch.Tensor:
        """Return the pieces, concatenated along each dim."""
        return _joined(list(zip(self._places, pieces, strict=True)), 0)


class Total(nn.Module):
    """The loss of a model in equal parts: the mean of the parts' losses."""

    def forward(self, *losses: torch.Tensor) -> torch.Tensor:
        """Return the mean, a scalar."""
        return torch.stack(losses).mean()


class TotalOfClasses(nn.Module):
    """The loss of a model in parts: the sum of the parts' losses, divided by the number of targets.

    Targets equal to ``ignored`` do not count.
    """

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self._ignored = ignored

    def forward(self, targets: torch.Tensor, *losses: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return torch.stack(losses).sum() / (targets != self._ignored).sum()


class _Builder:
    """Writes the module of all parts. ``shares``: by its key, which piece of which parameter or buffer a part holds."""

    def __init__(self, split: SplitGraph, captured: Captured) -> None:
        self._split, self._captured, self._whole = split, captured, split.graph
        self._graph = fx.Graph()
        self._modules: dict[str, nn.Module] = {}
        self._inputs = {t: self._graph.placeholder(f"input_{t}") for t in self._whole.inputs}
        # By tensor: of each part that makes some of it what that is, and the node.
        self._made: dict[int, list[tuple[Part, Read, fx.Node]]] = {}
        self._taken: dict[tuple[int, int, tuple[tuple[int, int, int], ...]], fx.Node] = {}
        self._held: dict[tuple[int, tuple[Cut, ...], int], torch.Tensor] = {}
        self.shares: dict[str, tuple[str, tuple[Cut, ...]]] = {}
        for items in split.parts:
            for item in items:
                self._run(item)
        self._graph.output(tuple(self._returned(t) for t in self._whole.outputs))

    def module(self) -> fx.GraphModule:
        """All parts, called in the order of their layers."""
        return fx.GraphModule(self._modules, self._graph, class_name="Parts")

    def _run(self, item: Part) -> None:
        name, size = part_name(item.layer, item.number), self._split.batch_size
        given = tuple(self._gather(read, name) for read in item.reads)
        feeds, fetches = [read.local for read in item.reads], [made.local for made in item.makes]
        held: dict[str, tuple[str, tuple[Cut, ...]]]
        if item.graph is self._whole:
            made = part(self._captured, feeds, fetches, batch_size=size, ops=item.ops)
            held = {key: (key, ()) for key in made.state_dict()}
        else:
            state = {local: self._share(item, local) for local in item.held}
            made = rebuild(
                item.graph, feeds, fetches, item.ops, batch_size=size, converters={}, state=state.__getitem__
            )
            names = {local: self._whole.tensors[tensor].name for local, (tensor, _) in item.held.items()}
            held = {names[local]: (names[local], cuts) for local, (_, cuts) in item.held.items()}
        self.shares |= {f"parts.{name}.ops.{key}": share for key, share in held.items()}
        node = self._call(name, PartOps(made), given)
        for place, read in enumerate(item.makes):
            found = self._graph.call_function(operator.getitem, (node, place))
            self._made.setdefault(read.tensor, []).append((item, read, found))

    def _call(self, name: str, module: nn.Module, given: tuple[fx.Node, ...]) -> fx.Node:
        self._modules[name] = module
        return self._graph.call_module(name, given)

    def _share(self, item: Part, local: int) -> torch.Tensor:
        """A parameter, buffer or constant of a part: the model's own, or a share of it that parts have in common."""
        tensor, cuts = item.held[local]
        held: torch.Tensor = self._captured.trace.attribute(self._whole.tensors[tensor].name)
        is_copy = local in item.copies
        if not cuts and not (is_copy and item.number):
            return held
        key = tensor, cuts, item.number if is_copy else -1
        if key not in self._held:
            share = _take(held.detach(), cuts).clone(memory_format=torch.contiguous_format)
            shape = [extent.fixed for extent in item.graph.tensors[local].shape]
            share = share.reshape(shape)
            is_parameter = isinstance(held, nn.Parameter)
            self._held[key] = nn.Parameter(share, held.requires_grad) if is_parameter else share
        return self._held[key]

    def _gather(self, read: Read, name: str) -> fx.Node:
        """What a part reads of a tensor: cut where it is made, joined where it is read."""
        if read.tensor in self._inputs:
            return self._inputs[read.tensor]
        made = self._made.get(read.tensor)
        if made is None:
            raise GraphError(f"Tensor {self._whole.tensors[read.tensor].name!r} is read before a part makes it.")
        pieces, places = [], []
        size = self._split.batch_size
        for number, ends, place in find_pieces(read, [item for _, item, _ in made], size, self._whole):
            maker, _, node = made[number]
            key = read.tensor, number, ends
            if ends and key not in self._taken:
                taking = f"{part_name(maker.layer, maker.number)}_take{len(self._taken)}"
                self._taken[key] = self._call(taking, Take(ends), (node,))
            pieces.append(self._taken[key] if ends else node)
            places.append(place)
        if len(pieces) == 1:
            return pieces[0]
        return self._call(f"{name}_join{len(self._modules)}", Join(places), tuple(pieces))

    def _returned(self, tensor: int) -> fx.Node:
        """An output of the whole graph, joined beside the first part that makes some of it."""
        whole = Read(tensor, (), tensor)
        made = self._made.get(tensor, [])
        name = part_name(made[0][0].layer, 0) if made else ""
        if len(made) == 1 or not self._is_loss_in_parts(tensor):
            return self._gather(whole, name)
        losses = tuple(node for _, _, node in made)
        if self._split.sums == "mean":
            return self._call(f"{name}_total", Total(), losses)
        op = next(op for op in self._whole.ops if tensor in op.outputs)
        targets = self._gather(Read(op.inputs[1], (), op.inputs[1]), name)
        ignored = int(dict(op.attributes).get("ignore_index", "-100"))
        return self._call(f"{name}_total", TotalOfClasses(ignored), (targets, *losses))

    def _is_loss_in_parts(self, tensor: int) -> bool:
        return self._whole.has_loss and tensor == self._whole.outputs[0]


def _take(value: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """A view of a share; a dim that is cut in several runs is two dims of it."""
    # The last dims first, so that the others keep their places.
    for cut in sorted(cuts, reverse=True):
        if cut.outer > 1:
            value = value.unflatten(cut.dim, (cut.outer, -1))
        dim = cut.dim + (cut.outer > 1)
        share = value.shape[dim] // cut.degree
        value = value.narrow(dim, cut.place * share, share)
    return value


def _joined(pieces: list[tuple[tuple[int, ...], torch.Tensor]], dim: int) -> torch.Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    groups: dict[int, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    for place, piece in pieces:
        groups.setdefault(place[dim], []).append((place, piece))
    rows = [_joined(groups[at], dim + 1) for at in sorted(groups)]
    return torch.cat(rows, dim) if len(rows) > 1 else rows[0]


def _check_loss(source: ModelSource, model: SplitModel, inputs: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError if the loss of the parts is not that of the model.

    It is another one where batch norm is in parts, and where numbers are drawn in the order of other strides.
    """
    if model.writes_copies or model.draws_random:
        return
    buffers = {id(item): (item, item.clone()) for item in (*source.model.buffers(), *model.buffers())}
    with torch.no_grad(), torch.random.fork_rng():
        losses = []
        for compute in (source.compute_loss, lambda: model(*inputs)):
            torch.manual_seed(0)
            losses.append(compute())
            for item, before in buffers.values():
                item.copy_(before)
    if not torch.allclose(losses[0].float(), losses[1].float(), rtol=_CLOSE, atol=0.0):
        raise CaptureError(
            f"The loss of {source.name} split into parts is {float(losses[1]):.6g}, but {float(losses[0]):.6g} for the "
            "model itself. This is a defect in Meshwright: please report it, and plan with another method."
        )
