"""What crosses between the stages of a rank and those of others: activations and gradients, microbatch by microbatch.

What one stage of the rank hands to another does not travel. Received tensors go back to the transport once nobody reads
them; sent ones are let go as soon as it is known that they arrived.
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

# Gradient sends that may be under way before the oldest is waited for. The wait only bounds the memory that they
# hold: they are awaited by stages before this one, never by one after it, so it cannot close a circle. Under an own
# schedule the replicas of such a stage may wait for each other's next gradients, and nothing is bounded.
_MAX_GRADIENT_SENDS = 4

# By the stage that it comes from.
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
        """What a stage has been handed of a microbatch."""
        return self._activations[stage, microbatch]

    def gradients(self, stage: int, microbatch: int) -> Received:
        """The gradients that it has been handed back."""
        return self._gradients[stage, microbatch]

    def send_activations(
        self, key: Key, stage: int, target: int, microbatch: int, tensors: Sequence[torch.Tensor], rank: int
    ) -> list[dist.Work]:
        """Send what a stage made of a microbatch to a stage on another rank."""
        self._activation_sends[stage, target, microbatch] = key
        return self._transport.send(tensors, self._layouts[stage, target, "activation"], rank)

    def send_gradients(
        self, key: Key, stage: int, target: int, tensors: Sequence[torch.Tensor], rank: int
    ) -> list[dist.Work]:
        """Send gradients to a stage before."""
        self._gradient_sends.append(key)
        if self._bound_gradient_sends and len(self._gradient_sends) > _MAX_GRADIENT_SENDS:
            self._pending.wait(self._gradient_sends.popleft())
        return self._transport.send(tensors, self._layouts[stage, target, "gradient"], rank)

    def receive(self, stage: int, source: int, microbatch: int, payload: Payload, rank: int) -> list[dist.Work]:
        """Let what a stage on another rank sends come in."""
        tensors, works = self._transport.receive(self._layouts[source, stage, payload], rank)
        inbox = self._activations if payload == "activation" else self._gradients
        inbox[stage, microbatch][source] = tensors
        return works

    def hand_on(self, stage: int, target: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Give what a stage made to another stage of this rank."""
        self._activations[target, microbatch][stage] = [value.detach() for value in tensors]

    def hand_back(self, stage: int, microbatch: int, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Give gradients to the stages of this rank before; what was sent to those behind has arrived."""
        for source, values in gradients.items():
            if source in self._stages:
                self._gradients[source, microbatch][stage] = values
        received = self._gradients[stage, microbatch]
        for channel in self._stages[stage].outgoing:
            # The gradient came back, so what was sent has arrived: this wait returns at once and frees the sender's
            # buffers.
            sent = self._activation_sends.pop((stage, channel.target, microbatch), None)
            if sent is not None and channel.target in received:
                self._pending.wait(sent)

    def give_back(self, stage: int, microbatch: int) -> None:
        """Nobody reads any more what came for a microbatch."""
        received = self._gradients.pop((stage, microbatch), {})
        arrived = self._activations.pop((stage, microbatch), {})
        for source, tensors in (*received.items(), *arrived.items()):
            if source not in self._stages:
                self._transport.recycle(tensors)

    def forget(self, stage: int, microbatch: int) -> None:
        """Nobody reads what came, but those who have it from here hold it further."""
        del self._activations[stage, microbatch]

    def settled(self) -> None:
        """Everything that was sent has been waited for."""
        self._gradient_sends.clear()
        self._activation_sends.clear()
