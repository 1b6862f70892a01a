"""Activations and gradients between the stages of a rank and those of others, microbatch by microbatch.

Values between two stages of the rank are not sent. Received tensors return to the transport after their last use; sent
ones are freed as soon as they are known to have arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from meshwright.runtime.pending import Key, Pending
from meshwright.runtime.transport import Transport, WireLayout
from meshwright.spec.instructions import Payload
from meshwright.spec.slices import StageSlice

# Gradient sends that may be in flight before the oldest is waited for. The wait only bounds their memory: they are
# received by stages before this one, never by one after it, so it cannot cause a deadlock. Under a user's own schedule
# the replicas of such a stage may wait for each other's next gradients, and the number is not bounded.
_MAX_GRADIENT_SENDS = 4

# By source stage.
Received = dict[int, list[torch.Tensor]]


class Messages:
    """The inboxes of a rank's stages. ``layouts`` are those of (source stage, target stage, payload)."""

    def __init__(
        self,
        stages: Mapping[int, StageSlice],
        transport: Transport,
        layouts: Mapping[tuple[int, int, str], tuple[WireLayout, ...]],
        pending: Pending,
        *,
        bound_gradient_sends: bool,
    ) -> None:
        self._stages, self._transport, self._layouts, self._pending = stages, transport, layouts, pending
        self._bound_gradient_sends = bound_gradient_sends
        self._gradient_sends: deque[Key] = deque()
        self._activation_sends: dict[tuple[int, int, int], Key] = {}
        self._activations: defaultdict[tuple[int, int], Received] = defaultdict(dict)
        self._gradients: defaultdict[tuple[int, int], Received] = defaultdict(dict)

    def activations(self, stage: int, microbatch: int) -> Received:
        """The activations that a stage has received of a microbatch."""
        return self._activations[stage, microbatch]

    def gradients(self, stage: int, microbatch: int) -> Received:
        """The gradients that a stage has received of a microbatch."""
        return self._gradients[stage, microbatch]

    def send_activations(
        self, key: Key, stage: int, target: int, microbatch: int, tensors: Sequence[torch.Tensor], rank: int
    ) -> list[dist.Work]:
        """Send a stage's outputs for a microbatch to a stage on another rank."""
        self._activation_sends[stage, target, microbatch] = key
        return self._transport.send(tensors, self._layouts[stage, target, "activation"], rank)

    def send_gradients(
        self, key: Key, stage: int, target: int, tensors: Sequence[torch.Tensor], rank: int
    ) -> list[dist.Work]:
        """Send gradients to an earlier stage."""
        self._gradient_sends.append(key)
        if self._bound_gradient_sends and len(self._gradient_sends) > _MAX_GRADIENT_SENDS:
            self._pending.wait(self._gradient_sends.popleft())
        return self._transport.send(tensors, self._layouts[stage, target, "gradient"], rank)

    def receive(self, stage: int, source: int, microbatch: int, payload: Payload, rank: int) -> list[dist.Work]:
        """Receive the values that a stage on another rank sends."""
        tensors, works = self._transport.receive(self._layouts[source, stage, payload], rank)
        inbox = self._activations if payload == "activation" else self._gradients
        inbox[stage, microbatch][source] = tensors
        return works

    def hand_on(self, stage: int, target: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Pass a stage's outputs to another stage of this rank."""
        self._activations[target, microbatch][stage] = [value.detach() for value in tensors]

    def hand_back(self, stage: int, microbatch: int, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Pass gradients to earlier stages of this rank; values sent to later stages have arrived."""
        for source, values in gradients.items():
            if source in self._stages:
                self._gradients[source, microbatch][stage] = values
        received = self._gradients[stage, microbatch]
        for channel in self._stages[stage].outgoing:
            # The gradient came back, so the sent values have arrived: this wait returns at once and frees the sender's
            # buffers.
            sent = self._activation_sends.pop((stage, channel.target, microbatch), None)
            if sent is not None and channel.target in received:
                self._pending.wait(sent)

    def give_back(self, stage: int, microbatch: int) -> None:
        """Release the values received for a microbatch, after their last use."""
        received = self._gradients.pop((stage, microbatch), {})
        arrived = self._activations.pop((stage, microbatch), {})
        for source, tensors in (*received.items(), *arrived.items()):
            if source not in self._stages:
                self._transport.recycle(tensors)

    def forget(self, stage: int, microbatch: int) -> None:
        """Drop the received values; other stages of this rank to which they were passed still hold them."""
        del self._activations[stage, microbatch]

    def settled(self) -> None:
        """Note that all sends have been waited for."""
        self._gradient_sends.clear()
        self._activation_sends.clear()
