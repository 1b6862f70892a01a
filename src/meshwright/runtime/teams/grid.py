"""The place of a process: process p of w in a team is device p % w of the rank p // w of the plan (`spec.teams`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from meshwright.spec import Sharding
from meshwright.spec.exchange import Axis
from meshwright.spec.sharding import AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """The processes of one axis that exchange with each other: their ``ranks``, and the ``index`` of this one."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPosition:
    """One process among teams of ``width``: the ``rank`` of the plan to which it belongs, and its place in the team."""

    process: int
    width: int
    axes: dict[Axis, AxisGroup] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Index of this process's team among the ranks of the plan."""
        return self.process // self.width

    @property
    def place(self) -> int:
        """Index of this process in its team."""
        return self.process % self.width

    def new_group(self, ranks: Sequence[int], description: str | None = None) -> dist.ProcessGroup:
        """Create a process group for each index in the teams of these ranks; return this process's group.

        All processes call it together.
        """
        made = [
            dist.new_group([rank * self.width + place for rank in ranks], group_desc=description)
            for place in range(self.width)
        ]
        return made[self.place]

    def process_of(self, rank: int) -> int:
        """Return the process of another team that has the same index as this one."""
        return rank * self.width + self.place


def make_grid(sharding: Sharding, process: int, num_ranks: int) -> TeamPosition:
    """Return the grid, and a process group for every row of every axis; all processes make all groups in one order."""
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
