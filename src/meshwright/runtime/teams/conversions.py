"""Conversions of the sharding (`program.sharding.convert`) over the processes of an axis, forward and backward.

The forward converts a tensor from its layout to the wanted one; the backward converts its gradient in the other
direction by the collective that the local graph lists for it, or by none if every process has what it needs:

    reduce_scatter, send   gradients are summed, each process keeps its shard
    all_reduce             they are summed
    all_gather             the shards of the gradient are joined
    all_to_all             they are sharded along the other dim
    none                   the own shard of a gradient that is whole everywhere, or the gradient itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.runtime.teams.grid import AxisGroup
from meshwright.runtime.teams.shares import Cut
from meshwright.spec.collective import CollectiveKind
from meshwright.torch_names import all_gather_single, reduce_scatter_single


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConversion:
    """``have`` and ``want``: the cuts before and after, None for full size; ``sums``: the input is a part of a sum.

    ``goes_round``: shards are passed round a ring.
    """

    axis: AxisGroup
    have: Cut | None
    want: Cut | None
    sums: bool
    backward: CollectiveKind | None
    goes_round: bool = False


class Convert(torch.nn.Module):
    """A conversion as a module."""

    def __init__(self, conversion: LocalConversion) -> None:
        super().__init__()
        self._conversion = conversion

    def forward(self, value: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        """The converted tensor; ``made`` is the result if it is known already, and nothing is sent then."""
        found: torch.Tensor = _Convert.apply(value, self._conversion, made)
        return found


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, conversion: LocalConversion, made: torch.Tensor | None) -> torch.Tensor:
        ctx.conversion = conversion
        if made is not None:
            return made.view_as(made)
        axis, have, want = conversion.axis, conversion.have, conversion.want
        if conversion.sums:
            return sum_shares(value, want, axis) if want is not None else sum_up(value, axis)
        if have is None:
            return want.shares(value, axis.size)[axis.index].contiguous() if want is not None else value.view_as(value)
        if want is not None:
            return swap(value, have, want, axis)
        return have.join(pass_round(value, axis) if conversion.goes_round else gather(value, axis))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        conversion: LocalConversion = ctx.conversion
        axis, have, want = conversion.axis, conversion.have, conversion.want
        match conversion.backward:
            case "reduce_scatter":
                assert have is not None
                made = sum_shares(gradient, have, axis)
            case "send":
                assert have is not None
                made = sum_round(have.shares(gradient, axis.size), axis)
            case "all_reduce":
                made = sum_up(gradient, axis)
            case "all_gather":
                assert want is not None
                made = want.join(gather(gradient, axis))
            case "all_to_all":
                assert want is not None
                made = swap(gradient, want, have, axis) if have is not None else want.join(gather(gradient, axis))
            case None:
                made = have.shares(gradient, axis.size)[axis.index] if have is not None else gradient
        return made, None, None


def gather(value: torch.Tensor, axis: AxisGroup) -> list[torch.Tensor]:
    """All-gather: the tensors of all processes."""
    found = value.new_empty(axis.size * value.numel())
    all_gather_single(found, value.contiguous().view(-1), group=axis.group)
    return list(found.view(axis.size, *value.shape).unbind())


def sum_up(value: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    """All-reduce: the sum over the processes."""
    found = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=axis.group)
    return found


def sum_shares(value: torch.Tensor, cut: Cut, axis: AxisGroup) -> torch.Tensor:
    """Reduce-scatter: the own shard of the sum."""
    shares = torch.stack(cut.shares(value, axis.size))
    found = torch.empty_like(shares[0])
    reduce_scatter_single(found.view(-1), shares.view(-1), group=axis.group)
    return found


def swap(value: torch.Tensor, have: Cut, want: Cut, axis: AxisGroup) -> torch.Tensor:
    """All-to-all: the same tensor, cut along another dim."""
    if have.dim == want.dim:
        return want.shares(have.join(gather(value, axis)), axis.size)[axis.index].contiguous()
    shares = torch.stack(want.shares(value, axis.size))
    found = torch.empty_like(shares)
    dist.all_to_all_single(found.view(-1), shares.view(-1), group=axis.group)
    return have.join(found.unbind())


def pass_round(value: torch.Tensor, axis: AxisGroup) -> list[torch.Tensor]:
    """The tensors of all processes, passed from one to the next."""
    found: list[torch.Tensor | None] = [None] * axis.size
    moving = value.contiguous()
    found[axis.index] = moving
    for step in range(1, axis.size):
        moving = _shift(moving, axis)
        found[(axis.index - step) % axis.size] = moving
    return [item for item in found if item is not None]


def sum_round(shares: Sequence[torch.Tensor], axis: AxisGroup) -> torch.Tensor:
    """The own shard of a sum, to which each process adds in turn."""
    moving = shares[(axis.index - 1) % axis.size].contiguous()
    for step in range(2, axis.size + 1):
        moving = _shift(moving, axis) + shares[(axis.index - step) % axis.size]
    return moving


def _shift(value: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    """Send a tensor to the next process, and receive that of the one before."""
    found = torch.empty_like(value)
    following, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[(axis.index - 1) % axis.size]
    # Together: NCCL runs what is issued between two processes in order, and in a ring of two both would send first.
    both = [
        dist.P2POp(dist.isend, value, following, group=axis.group),
        dist.P2POp(dist.irecv, found, before, group=axis.group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return found
