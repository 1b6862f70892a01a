"""Run one stage on one rank (`StageRunner`): forward and backward of a microbatch through the stage's module.

The module of a stage, called its part, is cut from the captured graph. `SplitPart` splits its backward into input
gradients and weight gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from meshwright.runtime.offload.saved_values import SavedLayers
from meshwright.runtime.random_state import read_generator, seed_generator, write_generator
from meshwright.runtime.versions import VersionedPart
from meshwright.spec import Channel, Graph, ProgramError, StageSlice

_CALLS = ("call_function", "call_module")

# Where the backward of an op continues to its parameters, and the gradient that arrived there.
Notes = list[tuple[GradientEdge, torch.Tensor]]


# Split backwards: first the gradients of a stage's received values, later those of its parameters. Every op of a part
# that reads a trainable parameter becomes an autograd node of its own (`_Later`), which runs the op on detached copies.
# Its backward computes only the gradients of its activations, and notes where its small graph ends and which gradients
# arrived there. `finish` continues from those notes to the parameters. Nothing is computed twice: together both halves
# do what one backward does.
class SplitPart:
    """A stage's module with split backwards: a backward computes input gradients, `finish` the weight gradients.

    Between the two, ``notes`` of the microbatch hold where to continue.
    """

    def __init__(self, part: torch.nn.Module) -> None:
        assert isinstance(part, fx.GraphModule), "parts are cut as graphs"
        self._sink = _Sink([])
        self._module = _defer(part, self._sink)
        self._trainable = [parameter for parameter in part.parameters() if parameter.requires_grad]

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the part; the backward of this call writes its notes into a new list (`notes`)."""
        self._sink.notes = []
        found: tuple[torch.Tensor, ...] = self._module(*values)
        return found

    @property
    def notes(self) -> Notes:
        """The list into which the backward of the last call writes its notes."""
        return self._sink.notes

    def finish(self, notes: Notes) -> None:
        """Add the postponed gradients to the parameters, and clear the notes."""
        if notes:
            edges, gradients = zip(*notes, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self._trainable)
        notes.clear()


@dataclass(slots=True)
class _Sink:
    """The list into which ops write their notes."""

    notes: Notes


class _Slot(NamedTuple):
    """The place of an input in the arguments of an op."""

    place: int
    is_weight: bool


class _LaterOp(torch.nn.Module):
    """An op with parameters among its inputs: called with its other inputs, then the parameters."""

    def __init__(self, target: Callable[..., Any], args: Any, kwargs: Any, sink: _Sink) -> None:
        super().__init__()
        self._target, self._args, self._kwargs, self._sink = target, args, kwargs, sink
        # The values that the op writes in place.
        self.written = _written_slots(target, args, kwargs)

    def forward(self, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
        anchor = torch.zeros((), requires_grad=True)
        return _Later.apply(self, weights, self._sink.notes, anchor, *values)

    def run(self, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
        """The op itself."""
        given = (values, weights)

        def fill(item: Any) -> Any:
            if isinstance(item, _Slot):
                return given[item.is_weight][item.place]
            if isinstance(item, list):
                return [fill(value) for value in item]
            if isinstance(item, tuple):
                return tuple(fill(value) for value in item)
            return {key: fill(value) for key, value in item.items()} if isinstance(item, dict) else item

        return self._target(*fill(self._args), **fill(self._kwargs))


class _Later(torch.autograd.Function):
    """An op with postponed gradients of its parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        op: _LaterOp,
        weights: Sequence[torch.Tensor],
        notes: Notes,
        anchor: torch.Tensor,  # noqa: ARG004 - with it the op is always reached by a backward
        *values: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        given = [value.detach().requires_grad_(value.requires_grad) for value in values]
        with torch.enable_grad():
            # A tensor that is written in place must not be a leaf.
            fresh = [value.clone() if place in op.written else value for place, value in enumerate(given)]
            made = op.run(fresh, weights)
        several = isinstance(made, list | tuple)
        outputs = list(made) if several else [made]
        ctx.wanted = [get_gradient_edge(value) if value.requires_grad else None for value in given]
        ctx.ends = [get_gradient_edge(value) if _is_differentiable(value) else None for value in outputs]
        ctx.notes = notes
        returned = [value.detach() if isinstance(value, torch.Tensor) else value for value in outputs]
        for place in op.written:
            with torch.no_grad():
                values[place].copy_(fresh[place])
            ctx.mark_dirty(values[place])
            pairs = zip(outputs, returned, strict=True)
            returned = [values[place] if value is fresh[place] else back for value, back in pairs]
        ends = zip(returned, ctx.ends, strict=True)
        ctx.mark_non_differentiable(*(back for back, end in ends if end is None and isinstance(back, torch.Tensor)))
        return tuple(returned) if several else returned[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        pairs = [
            (end, gradient)
            for end, gradient in zip(ctx.ends, gradients, strict=True)
            if end is not None and gradient is not None
        ]
        places = [place for place, edge in enumerate(ctx.wanted) if edge is not None]
        found: list[torch.Tensor | None] = [None] * len(ctx.wanted)
        if pairs and places:
            ends, arrived = zip(*pairs, strict=True)
            edges = [ctx.wanted[place] for place in places]
            made = torch.autograd.grad(ends, edges, arrived, retain_graph=True, allow_unused=True)
            for place, gradient in zip(places, made, strict=True):
                found[place] = gradient
        ctx.notes.extend(pairs)
        return (None, None, None, None, *found)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _defer(part: fx.GraphModule, sink: _Sink) -> fx.GraphModule:
    """The part in which ops that read trainable parameters, or values made only of these, are `_LaterOp`s."""
    trainable = {name for name, parameter in part.named_parameters() if parameter.requires_grad}
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    weights: set[fx.Node] = set()
    state: set[fx.Node] = set()
    operations = dict[str, _LaterOp]()

    def defer(target: Callable[..., Any], args: Any, kwargs: Any, inputs: Sequence[fx.Node]) -> fx.Node:
        values = [item for item in inputs if item not in weights]
        held = [item for item in inputs if item in weights]
        slots = {item: _Slot(values.index(item), False) for item in values}
        slots |= {item: _Slot(held.index(item), True) for item in held}
        name = f"later_{len(operations)}"
        operations[name] = _LaterOp(target, _with_slots(args, slots), _with_slots(kwargs, slots), sink)
        return graph.call_module(name, ([made[item] for item in values], [made[item] for item in held]))

    for node in part.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "output":
            # A parameter that is an output becomes a value like others.
            made |= {item: defer(torch.clone, (item,), {}, [item]) for item in inputs if item in weights}
        elif node.op == "get_attr":
            (weights if node.target in trainable else state).add(node)
        elif node.op in _CALLS and inputs and all(item in weights or item in state for item in inputs):
            # Made only of parameters, such as a transpose: it belongs to them.
            (weights if any(item in weights for item in inputs) else state).add(node)
        elif node.op in _CALLS and any(item in weights for item in inputs):
            target = part.get_submodule(node.target) if node.op == "call_module" else node.target
            made[node] = defer(target, node.args, node.kwargs, inputs)
            continue
        made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule({**_attributes(part), **operations}, graph, class_name="SplitPart")


def _attributes(part: fx.GraphModule) -> dict[str, Any]:
    nodes = (node for node in part.graph.nodes if node.op in ("get_attr", "call_module"))
    return {node.target: operator.attrgetter(node.target)(part) for node in nodes}


def _with_slots(item: Any, slots: dict[fx.Node, _Slot]) -> Any:
    """Arguments with slots in place of nodes."""
    if isinstance(item, fx.Node):
        return slots[item]
    if isinstance(item, list):
        return [_with_slots(value, slots) for value in item]
    if isinstance(item, tuple):
        return tuple(_with_slots(value, slots) for value in item)
    return {key: _with_slots(value, slots) for key, value in item.items()} if isinstance(item, dict) else item


def _written_slots(target: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, ...]:
    """Indices, among an op's values, of those that its schema marks as written."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    written = (argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write)
    slots = (given.get(name) for name in written)
    return tuple(slot.place for slot in slots if isinstance(slot, _Slot) and not slot.is_weight)


Part = torch.nn.Module | SplitPart | VersionedPart


@dataclass(slots=True)
class _Tape:
    """Values that a microbatch keeps between its forward and its backward; ``notes``: between the backward's parts."""

    leaves: dict[int, torch.Tensor]
    outputs: dict[int, torch.Tensor]
    notes: Notes
    version: int


class StageRunner:
    """Runs the forwards and backwards of a stage.

    ``part(*values)`` takes the tensors of `stage_feeds` and returns those of `stage_fetches`. A `SplitPart` can also
    split backwards, a `VersionedPart` run older weights. ``autocast``: forwards run under torch's autocast to this
    type. ``channels_last``: input images are converted to this memory format. ``saved``: offloads activations.
    """

    def __init__(
        self,
        part: Part,
        graph: Graph,
        stage: StageSlice,
        device: torch.device,
        autocast: torch.dtype | None = None,
        *,
        channels_last: bool = False,
        saved: SavedLayers | None = None,
    ) -> None:
        self._part = part
        self._device = device
        self._stage = stage
        self._training = graph.mode == "training" and stage.has_backward
        self._fetches = stage_fetches(stage)
        self._loss = graph.outputs[0] if graph.has_loss and graph.outputs[0] in stage.outputs else None
        self._autocast = autocast
        self._channels_last = channels_last
        self._saved = saved
        self._tapes: dict[int, _Tape] = {}
        self._notes: dict[int, Notes] = {}
        self._sums_across = True

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[torch.Tensor],
        received: Mapping[int, Sequence[torch.Tensor]],
        seed: int,
        version: int = 0,
    ) -> dict[int, torch.Tensor]:
        """Run the forward of a microbatch; return the outputs (`stage_fetches`) by tensor id.

        ``inputs``: this microbatch's graph inputs in the order of the stage. ``received``: by source stage, the
        channel's tensors, followed by the random generator's state if the channel carries it. ``seed`` seeds the
        generator if no state arrives. ``version``: that of the weights, for a `VersionedPart`.
        """
        leaves: dict[int, torch.Tensor] = {}
        for channel in self._stage.incoming:
            needs_gradient = set(channel.gradients) if self._training else set()
            for tensor, value in zip(channel.tensors, received[channel.source], strict=False):
                leaves[tensor] = value.detach().requires_grad_() if tensor in needs_gradient else value
        values = [*map(laid_out, inputs)] if self._channels_last else [*inputs]
        values += leaves.values()
        with torch.set_grad_enabled(self._training), autocasting(self._device, self._autocast):
            if self._stage.draws_random:
                self._restore_generator(received, seed)
            with self._recording(microbatch, values):
                made = self._part(version, *values) if isinstance(self._part, VersionedPart) else self._part(*values)
            outputs = dict(zip(self._fetches, made, strict=True))
        if self._training:
            notes = self._part.notes if isinstance(self._part, SplitPart) else []
            self._tapes[microbatch] = _Tape(leaves, outputs, notes, version)
        return outputs

    def backward(
        self,
        microbatch: int,
        received: Mapping[int, Sequence[torch.Tensor]],
        loss_scale: float,
        *,
        is_last: bool = True,
    ) -> dict[int, list[torch.Tensor]]:
        """Run the backward of a microbatch; return the gradients to send, by source stage.

        Adds to the parameters' gradients. ``received``: by target stage, the gradients of its channel. ``loss_scale``:
        the gradient of the loss with respect to itself. ``is_last``: the last backward before an update, in which
        groups of replicas that shard parameters sum their gradients with each other.
        """
        if isinstance(self._part, FSDPModule) and is_last != self._sums_across:
            self._part.set_requires_all_reduce(is_last)
            self._sums_across = is_last
        found = self.backward_input(microbatch, received, loss_scale)
        self.backward_weight(microbatch)
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Add the weight gradients that `backward_input` postponed; does nothing unless backwards are split."""
        notes = self._notes.pop(microbatch)
        if isinstance(self._part, SplitPart):
            self._part.finish(notes)

    def backward_input(
        self, microbatch: int, received: Mapping[int, Sequence[torch.Tensor]], loss_scale: float
    ) -> dict[int, list[torch.Tensor]]:
        """Compute the input gradients of a microbatch; return the gradients to send, as `backward`.

        Unless backwards are split, this adds the weight gradients, too.
        """
        tape = self._tapes.pop(microbatch)
        gradients: dict[int, torch.Tensor] = {}
        for channel in self._stage.outgoing:
            if channel.gradients:
                for tensor, value in zip(channel.gradients, received[channel.target], strict=True):
                    gradients[tensor] = gradients[tensor] + value if tensor in gradients else value
        if self._loss is not None:
            loss = tape.outputs[self._loss]
            gradients[self._loss] = torch.full_like(loss, loss_scale)
        with self._saved.replaying(microbatch) if self._saved is not None else nullcontext():
            torch.autograd.backward([tape.outputs[tensor] for tensor in gradients], list(gradients.values()))
        self._notes[microbatch] = tape.notes
        if isinstance(self._part, VersionedPart):
            self._part.went_back(tape.version)
        return {
            channel.source: [_gradient(tape.leaves[tensor]) for tensor in channel.gradients]
            for channel in self._stage.incoming
            if channel.gradients
        }

    @property
    def versions(self) -> VersionedPart:
        """The part with several versions of the stage's weights. Raises ProgramError if it has one version."""
        if not isinstance(self._part, VersionedPart):
            raise ProgramError(
                f"The program stashes or drops weights of stage {self._stage.index}, but the stage has one version of "
                "them. Build the program again from its plan."
            )
        return self._part

    def updated(self) -> None:
        """Call after the optimizer made a new version of the stage's weights."""
        if isinstance(self._part, VersionedPart):
            self._part.updated()

    def restart(self) -> None:
        """Renumber the current weights as version 0."""
        if isinstance(self._part, VersionedPart):
            self._part.restart()

    def leaving(self, channel: Channel, outputs: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors to send on a channel after a forward, with the generator's state if it carries that."""
        values = [outputs[tensor] for tensor in channel.tensors]
        return [*values, read_generator(self._device)] if channel.carries_rng else values

    def _recording(self, microbatch: int, values: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        if self._saved is None or not self._training:
            return nullcontext()
        assert isinstance(self._part, torch.nn.Module), "backwards are whole, and weights of one version"
        return self._saved.recording(microbatch, self._part, values)

    def _restore_generator(self, received: Mapping[int, Sequence[torch.Tensor]], seed: int) -> None:
        for channel in self._stage.incoming:
            if channel.carries_rng:
                write_generator(self._device, received[channel.source][-1])
                return
        seed_generator(self._device, seed)


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context of torch's autocast to ``dtype``; an empty context for None."""
    return torch.autocast(device.type, dtype) if dtype is not None else nullcontext()


def laid_out(value: torch.Tensor) -> torch.Tensor:
    """Return a batch of images (4 dims, floating point) in channels-last memory format; other tensors unchanged."""
    is_image = value.ndim == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def stage_feeds(stage: StageSlice) -> tuple[int, ...]:
    """Return tensor ids of the module's inputs: the stage's graph inputs, then the received tensors, in order."""
    return (*stage.inputs, *(tensor for channel in stage.incoming for tensor in channel.tensors))


def stage_fetches(stage: StageSlice) -> tuple[int, ...]:
    """Return tensor ids of the module's outputs: the tensors to send and the graph outputs, each once."""
    sent = (tensor for channel in stage.outgoing for tensor in channel.tensors)
    return tuple(dict.fromkeys((*sent, *stage.outputs)))


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient that arrived at a leaf; zero if nothing in this microbatch depended on it differentiably."""
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
