"""Weights of several versions: the optimizer's current ones, and copies of older ones that are still needed.

Under asynchronous schedules a microbatch runs forward and backward with one version of the weights, while updates make
newer ones. A forward reads the memory of its version directly. Before an update of a version that is still needed
(`Stash`), the newest weights are copied to other memory, where possible that of a dropped version (`Drop`). So a stage
holds one set of trainable weights per version, and allocates nothing after the largest number of versions is reached.

The optimizer's parameters stay the same objects, so that its state and all hooks stay valid. The gradients of every
version arrive at these parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from meshwright.spec import ProgramError


class VersionedPart:
    """A stage's module that can run with several versions of its weights; the first version is 0.

    ``ahead``: forwards use weights predicted this number of updates ahead (`optimizer_steps`), 0 for none. Predictions
    take one more set of weights per version.
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
        """The number of sets of weights in memory: the newest, the stashed ones, and spare memory for later ones."""
        return 1 + len(self._kept) + len(self._spare)

    def __call__(self, version: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the module with one version of the weights.

        The backward adds to the gradients of the optimizer's parameters.

        Raises ProgramError for a version that is not held.
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
        """Call after the backward of a microbatch that ran its forward with this version."""
        self._open -= version == self._newest

    def stash(self, version: int) -> None:
        """Keep the newest version, which is about to be updated.

        Raises ProgramError if ``version`` is not the newest version.
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
        """Call after the optimizer updated the newest version; its number rises by 1.

        Raises ProgramError if microbatches still need the old version, and it was not stashed.
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
        """Renumber the newest version as 0, after all microbatches have ended.

        Raises ProgramError if older versions are still held.
        """
        if self._kept or self._open:
            raise ProgramError(
                f"The program ended while older versions of the weights were kept or in use (kept: {[*self._kept]}). "
                "Build the program again from its plan."
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
