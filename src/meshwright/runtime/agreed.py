"""A number that is summed over all ranks before an update, such as the squared norm of all gradients.

The program issues its all-reduce (`program.gradient_exchange`) after the all-reduces of the gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.runtime.teams.grid import TeamPosition
from meshwright.runtime.transport import Transport


class AgreedNumber(ABC):
    """A number that the program all-reduces over all ranks, under the bucket number ``index``.

    ``complete()`` is called first: it sums the gradients of which each process of a team holds only a part.
    """

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
        """Start to sum the contributions of all processes; return the works to wait for.

        The sum over the team is synchronous, that over ``ranks`` is not. Gradients have to be summed before.
        """
        self._complete()
        self._total.zero_()
        self._add_own()
        for axis in self._grid.axes.values():
            dist.all_reduce(self._total, group=axis.group)
        return self._transport.sum_over(self._total, ranks)

    @abstractmethod
    def _add_own(self) -> None:
        """Add this process's contribution to the total."""
