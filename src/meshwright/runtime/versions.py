"""Weights of several versions: the optimizer's current ones, and copies of older ones that are still needed.

A microbatch runs forward and backward with weights of one version, while updates make newer ones. Nothing is copied
for a microbatch: a forward reads the memory of its version, and autograd keeps that. Only an update of a version that
is still needed (`Stash`) moves the optimizer to other memory, which a dropped version (`Drop`) left behind; so a stage
holds one set of its trainable weights per version, and allocates nothing after the largest number of versions was
reached.

The optimizer's parameters stay the same objects, so that its state and every hook on them are unchanged: gradients of
any version arrive at them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from meshwright.spec import ProgramError


class VersionedPart:
    """A part that is called with weights of a version; the newest is 0 at first.

    ``ahead``: predicted weights this number of updates later are used instead (`optimizer_steps`), one set per version.
    """

    def __init__(self, part: torch.nn.Module, ahead: int = 0) -> None:
        self._part = part
        self._ahead = ahead
        self._predicted: dict[int, list[torch.Tensor]] = {}
        self._trained = {name: item for name, item in part.named_parameters() if item.requires_grad}
        self._newest = 0
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._spare: list[list[torch.Tensor]] = []
        # The number of forwards with the newest version whose backward has not run.
        self._open = 0

    @property
    def num_sets(self) -> int:
        """Sets of weights that are held: the newest, the stashed ones, and memory for the next."""
        return 1 + len(self._kept) + len(self._spare)

    def __call__(self, version: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The part's fetches with weights of a version; their backward adds to the gradients of the parameters.

        Raises ProgramError for a version that is not available.
        """
        weights = self._predicted.get(version) or self._weights(version)
        self._open += version == self._newest and torch.is_grad_enabled()
        used = {
            name: _Read.apply(parameter, weight)
            for (name, parameter), weight in zip(self._trained.items(), weights, strict=True)
        }
        found: tuple[torch.Tensor, ...] = functional_call(self._part, used, values)
        return found

    def went_back(self, version: int) -> None:
        """Note the end of the backward of a microbatch that ran forward with a version."""
        self._open -= version == self._newest

    def stash(self, version: int) -> None:
        """Stash the newest version, which is about to be updated.

        Raises ProgramError if ``version`` is another one.
        """
        if version != self._newest:
            raise ProgramError(
                f"Version {version} of the weights cannot be kept; expected the newest, {self._newest}. Build the "
                "program again from its plan."
            )
        parameters = list(self._trained.values())
        kept = [item.data for item in parameters]
        moved = self._spare.pop() if self._spare else [torch.empty_like(item) for item in kept]
        torch._foreach_copy_(moved, kept)
        for parameter, item in zip(parameters, moved, strict=True):
            parameter.data = item
        self._kept[version] = kept
        self._open = 0

    def drop(self, version: int) -> None:
        """Drop a stashed version; the next stash reuses its memory."""
        self._spare.append(self._kept.pop(version))
        self._predicted.pop(version, None)

    def updated(self) -> None:
        """Note that the optimizer updated the newest version.

        Raises ProgramError if microbatches need that version, and it was not stashed.
        """
        if self._open:
            raise ProgramError(
                f"Version {self._newest} of the weights was updated while {self._open} microbatches were between their "
                "forward and their backward with it. Build the program again from its plan."
            )
        before = self._kept.get(self._newest)
        if before is None:
            self._predicted.pop(self._newest, None)
        self._newest += 1
        if self._ahead and before is not None:
            now = self._weights(self._newest)
            changes = torch._foreach_sub(now, before)
            self._predicted[self._newest] = list(torch._foreach_add(now, changes, alpha=self._ahead))

    def restart(self) -> None:
        """Renumber the newest version as 0, when no other is needed.

        Raises ProgramError if others are stashed.
        """
        if self._kept or self._open:
            raise ProgramError(
                f"The program ended while versions {[*self._kept]} of the weights were kept. Build it again from its "
                "plan."
            )
        self._newest = 0
        self._predicted.clear()

    def _weights(self, version: int) -> list[torch.Tensor]:
        if version in self._kept:
            return self._kept[version]
        if version != self._newest:
            raise ProgramError(
                f"Version {version} of the weights is needed; available are {[*self._kept, self._newest]}. Build the "
                "program again from its plan."
            )
        return [item.data for item in self._trained.values()]


class _Read(torch.autograd.Function):
    """Weights of some version, whose gradient goes to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - autograd's
        # Shares the parameter's memory, but not its counter of writes.
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None
