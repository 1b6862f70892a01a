"""A number on which all ranks agree before an update: an all-reduce sums the contributions of all ranks.

The program issues the all-reduce (`program.gradient_exchange`), after the sums of gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.runtime.teams.grid import TeamPosition
from meshwright.runtime.transport import Transport


class AgreedNumber(ABC):
    """A number that the program all-reduces as bucket ``index``; ``complete()`` first makes gradients complete."""

    def __init__(
        self,
        index: int,
        complete: Callable[[], None],
        grid: TeamPosition,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.index = index
        self._complete, self._grid, self._transport = complete, grid, transport
        self._total = torch.zeros(1, dtype=dtype, device=device)

    def begin(self, ranks: tuple[int, ...]) -> list[dist.Work]:
        """Add this process's contribution and sum it over all ranks, after the gradients were summed."""
        self._complete()
        self._total.zero_()
        self._add_own()
        for axis in self._grid.axes.values():
            dist.all_reduce(self._total, group=axis.group)
        return self._transport.sum_over(self._total, ranks)

    @abstractmethod
    def _add_own(self) -> None:
        """Add this process's contribution to the total."""
