"""One stage on one rank: forward and backward of a microbatch through the part that was cut from the captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.runtime.offload.saved import SavedLayers
from meshwright.runtime.random_state import read_generator, seed_generator, write_generator
from meshwright.runtime.split_backward import Notes, SplitPart
from meshwright.runtime.versions import VersionedPart
from meshwright.spec.errors import ProgramError
from meshwright.spec.graph import Graph
from meshwright.spec.slices import Channel, StageSlice

Part = torch.nn.Module | SplitPart | VersionedPart


@dataclass(slots=True)
class _Tape:
    """Values that a microbatch keeps between its forward and its backward; ``notes``: between the backward's parts."""

    leaves: dict[int, torch.Tensor]
    outputs: dict[int, torch.Tensor]
    notes: Notes
    version: int


class StageRunner:
    """Runs a stage's part: ``part(*values)`` takes the values of `stage_feeds` and returns those of `stage_fetches`.

    A `SplitPart` can also run backwards in two parts, a `VersionedPart` older weights. ``autocast``: forwards run under
    torch's autocast to that type. ``channels_last``: input images are converted to that layout. ``saved``: saved
    activations are on the host until the backward.
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
        """Run forward; returns the fetched values by tensor id.

        ``inputs`` are this microbatch's graph inputs in the order of the stage; ``received`` maps a source stage to
        the channel's tensors, followed by the generator's state if the channel carries it. ``seed`` starts the
        generator if no state arrives. ``version`` of the weights: for a `VersionedPart`.
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
        """Run backward, adding to the parameters' gradients; returns the gradients to send, by source stage.

        ``received`` maps a target stage to the gradients of its channel; ``loss_scale`` is the loss's own. In the last
        backward before an update, groups of replicas that shard states sum with each other.
        """
        if isinstance(self._part, FSDPModule) and is_last != self._sums_across:
            self._part.set_requires_all_reduce(is_last)
            self._sums_across = is_last
        found = self.backward_input(microbatch, received, loss_scale)
        self.backward_weight(microbatch)
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Add the gradients that `backward_input` postponed; does nothing if the part is not split."""
        notes = self._notes.pop(microbatch)
        if isinstance(self._part, SplitPart):
            self._part.finish(notes)

    def backward_input(
        self, microbatch: int, received: Mapping[int, Sequence[torch.Tensor]], loss_scale: float
    ) -> dict[int, list[torch.Tensor]]:
        """The gradients to send, as in `backward`. A part that is not split adds to its parameters' gradients, too."""
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
        """The versions of the stage's weights. Raises ProgramError if it has only one."""
        if not isinstance(self._part, VersionedPart):
            raise ProgramError(
                f"The program stashes or drops weights of stage {self._stage.index}, but it has one version of them. "
                "Build the program again from its plan."
            )
        return self._part

    def updated(self) -> None:
        """Note that the optimizer made a new version of the stage's weights."""
        if isinstance(self._part, VersionedPart):
            self._part.updated()

    def restart(self) -> None:
        """The stage's weights, as they are, become version 0."""
        if isinstance(self._part, VersionedPart):
            self._part.restart()

    def leaving(self, channel: Channel, outputs: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The values of a channel after a forward: its tensors, and the generator's state if the channel carries it."""
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
    """Torch's autocast to a type; a null context for None."""
    return torch.autocast(device.type, dtype) if dtype is not None else nullcontext()


def laid_out(value: torch.Tensor) -> torch.Tensor:
    """A batch of images in channels-last layout; any other tensor unchanged."""
    is_image = value.ndim == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def stage_feeds(stage: StageSlice) -> tuple[int, ...]:
    """Ids of the part's inputs: the stage's graph inputs, then the tensors of its channels, in order."""
    return (*stage.inputs, *(tensor for channel in stage.incoming for tensor in channel.tensors))


def stage_fetches(stage: StageSlice) -> tuple[int, ...]:
    """Ids of the part's results: the tensors sent on its channels and the graph outputs, each once."""
    sent = (tensor for channel in stage.outgoing for tensor in channel.tensors)
    return tuple(dict.fromkeys((*sent, *stage.outputs)))


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient that arrived at a leaf; zero if nothing in this microbatch depended on it differentiably."""
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
