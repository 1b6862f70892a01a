"""The position of a process among the teams.

With teams of w processes, process p is device p % w of rank p // w of the plan (`spec.teams`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from meshwright.spec import Sharding
from meshwright.spec.exchange import Axis
from meshwright.spec.sharding import AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """The process group of one mesh axis: the process numbers ``ranks``, and the ``index`` of this process in it."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPosition:
    """The position of one process: number ``process`` of all, in teams of ``width`` processes.

    ``axes``: its process group for each mesh axis with more than one process.
    """

    process: int
    width: int
    axes: dict[Axis, AxisGroup] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank of the plan whose team this process belongs to."""
        return self.process // self.width

    @property
    def place(self) -> int:
        """The index of this process in its team."""
        return self.process % self.width

    def new_group(self, ranks: Sequence[int], description: str | None = None) -> dist.ProcessGroup:
        """Return the group of the processes that have this process's index in the teams of ``ranks`` (of the plan).

        It makes such a group for every index. All processes call it together.
        """
        made = [
            dist.new_group([rank * self.width + place for rank in ranks], group_desc=description)
            for place in range(self.width)
        ]
        return made[self.place]

    def process_of(self, rank: int) -> int:
        """Return the number of the process with the same index in the team of ``rank``."""
        return rank * self.width + self.place


def make_grid(sharding: Sharding, process: int, num_ranks: int) -> TeamPosition:
    """Return the position of ``process``, and make the process groups of all axes and teams.

    All processes call it together, so that all make all groups in the same order.
    """
    axes: dict[Axis, AxisGroup] = {}
    for axis in AXES:
        size, stride = sharding.size(axis), sharding.stride(axis)
        if size == 1:
            continue
        firsts = [p for p in range(num_ranks * sharding.width) if p // stride % size == 0]
        for first in firsts:
            ranks = tuple(first + stride * index for index in range(size))
            group = dist.new_group(list(ranks))
            if process in ranks:
                axes[axis] = AxisGroup(group=group, ranks=ranks, index=ranks.index(process))
    return TeamPosition(process=process, width=sharding.width, axes=axes)
