"""Clipping by the norm of all gradients, wherever they lie: every parameter counts once.

A rank adds up the squares of its gradients, each over the number of processes that hold it alike; the program's own
all-reduce over all ranks (`program.exchange`) sums that up before the first update. All updates of the step are then
multiplied with max_norm / (norm + 1e-6), at most 1, as torch's clip_grad_norm_ does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from meshwright.runtime.teams import Grid
from meshwright.runtime.transport import Transport

# What torch.nn.utils.clip_grad_norm_ adds to the norm.
_EPSILON = 1e-6


class NormClip:
    """The norm of a step. ``holders``: by tensor id, how many processes hold a parameter (or the same share) alike."""

    def __init__(
        self,
        max_norm: float,
        parameters: Mapping[int, torch.nn.Parameter],
        holders: Mapping[int, int],
        complete: Callable[[], None],
        grid: Grid,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._max_norm = max_norm
        self._parameters = [(item, 1.0 / holders[i]) for i, item in parameters.items() if item.requires_grad]
        self._complete, self._grid, self._transport = complete, grid, transport
        self._total = torch.zeros(1, dtype=torch.float64, device=device)

    def begin(self, ranks: tuple[int, ...]) -> list[dist.Work]:
        """Gradients are summed: add up their squares over all ranks."""
        self._complete()
        self._total.zero_()
        for parameter, share in self._parameters:
            if parameter.grad is not None:
                self._total += share * parameter.grad.double().square().sum()
        for axis in self._grid.axes.values():
            dist.all_reduce(self._total, group=axis.group)
        return self._transport.sum_over(self._total, ranks)

    def coefficient(self) -> torch.Tensor:
        """What to multiply gradients with, behind `begin` and its works."""
        return (self._max_norm / (self._total.sqrt() + _EPSILON)).clamp(max=1.0)
