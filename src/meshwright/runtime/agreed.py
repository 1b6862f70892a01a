"""A number on which all ranks agree before an update: each adds its own part, and an all-reduce sums that up.

The program issues the all-reduce (`program.exchange`), behind the sums of gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.runtime.teams import TeamPosition
from meshwright.runtime.transport import Transport


class AgreedNumber(ABC):
    """In the program the all-reduce of a bucket number ``index``; ``complete()`` makes gradients whole first."""

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
        """Gradients are summed: take this process's part of the number, and sum it up over all ranks."""
        self._complete()
        self._total.zero_()
        self._add_own()
        for axis in self._grid.axes.values():
            dist.all_reduce(self._total, group=axis.group)
        return self._transport.sum_over(self._total, ranks)

    @abstractmethod
    def _add_own(self) -> None:
        """Add this process's part to the total."""
