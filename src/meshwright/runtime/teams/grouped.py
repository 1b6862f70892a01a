"""Routed tokens on their way to the ranks that have their experts, and back (`program.sharding.dispatch`).

    received  (ranks, experts here): the number of rows from each rank for each expert
    arrival   the index, among the arriving rows rank by rank, of the i-th row in the order of the experts
    return    the inverse of that

The number of rows is known only at run time: counts are exchanged first, and read by the host, as the all-to-all of the
rows needs them. Gradients go in the other direction. No row is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.program.sharding import MESH
from meshwright.runtime.teams.grid import AxisGroup
from meshwright.spec.graph import Op


def count_rows(ends: torch.Tensor) -> torch.Tensor:
    """Rows per expert, from the ends of their ranges."""
    return torch.diff(ends, prepend=ends.new_zeros(1)).long()


def expert_of_arrived(received: torch.Tensor) -> torch.Tensor:
    """The expert, among those here, of each row as it arrives."""
    num_ranks, num_experts = received.shape
    experts = torch.arange(num_experts, device=received.device).repeat(num_ranks)
    return experts.repeat_interleave(received.flatten())


def arrival(received: torch.Tensor) -> torch.Tensor:
    """Indices into the arriving rows, in the order of the experts."""
    return expert_of_arrived(received).argsort(stable=True)


def arrival_inverse(received: torch.Tensor) -> torch.Tensor:
    """Indices into the order of the experts, for the rows as they arrived."""
    return arrival(received).argsort()


def group_ends(received: torch.Tensor) -> torch.Tensor:
    """The ends of the rows of each expert."""
    return received.sum(0).cumsum(0).int()


def group_ids(received: torch.Tensor) -> torch.Tensor:
    """The expert of each row, in the order of the experts."""
    return expert_of_arrived(received).sort().values


ARRANGING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f"{MESH}arrival.default": arrival,
    f"{MESH}return.default": arrival_inverse,
    f"{MESH}group_ends.default": group_ends,
    f"{MESH}group_ids.default": group_ids,
}
COUNTING = f"{MESH}exchange_counts.default"
DISPATCH = f"{MESH}dispatch.default"
COMBINE = f"{MESH}combine.default"


def arranging_module(op: Op, axis: AxisGroup | None) -> torch.nn.Module | None:
    """The module for an op of dispatch and combine; None for other ops."""
    if op.kind in ARRANGING:
        return Arrange(ARRANGING[op.kind])
    if axis is None or op.kind not in (COUNTING, DISPATCH, COMBINE):
        return None
    return ExchangeCounts(axis) if op.kind == COUNTING else ExchangeRows(axis, is_home=op.kind == COMBINE)


class Arrange(torch.nn.Module):
    """A function of the counts alone."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Integers."""
        return self._function(received)


class ExchangeCounts(torch.nn.Module):
    """The number of rows from each rank for each expert here."""

    def __init__(self, axis: AxisGroup) -> None:
        super().__init__()
        self._axis = axis

    def forward(self, ends: torch.Tensor) -> torch.Tensor:
        """Ends of the own rows of all experts → (ranks, experts here)."""
        sent = count_rows(ends)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._axis.group)
        return received.view(self._axis.size, -1)


class ExchangeRows(torch.nn.Module):
    """Rows to the ranks that have their experts; ``is_home``: back to those that sent them."""

    def __init__(self, axis: AxisGroup, *, is_home: bool) -> None:
        super().__init__()
        self._axis, self._is_home = axis, is_home

    def forward(self, rows: torch.Tensor, ends: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """The arriving rows, in the order of the ranks."""
        sent = count_rows(ends).view(self._axis.size, -1).sum(1)
        out, back = torch.stack((sent, received.sum(1))).tolist()
        if self._is_home:
            out, back = back, out
        found: torch.Tensor = _ExchangeRows.apply(rows, out, back, self._axis)
        return found


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], axis: AxisGroup
    ) -> torch.Tensor:
        ctx.exchange = sent, received, axis
        return _send(rows, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, axis = ctx.exchange
        return _send(gradient, received, sent, axis), None, None, None


def _send(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], axis: AxisGroup) -> torch.Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=axis.group)
    return found
