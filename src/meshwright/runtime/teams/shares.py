"""Cut a process's shard out of a tensor, by the tensor's layout, and join all shards to the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.spec import Graph, Shard, Sharding
from meshwright.spec.exchange import Axis
from meshwright.spec.sharding import Layout

# The order in which axes split a tensor; later axes split what earlier ones left, for example along tokens.
SPLITTING_ORDER: tuple[Axis, ...] = ("expert", "context", "tensor")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor of a known batch size is sharded along a dim.

    The dim has ``parts`` equal sections, each sharded by itself, as the three sections of a fused QKV weight.
    """

    dim: int
    parts: int

    def shares(self, value: torch.Tensor, size: int) -> list[torch.Tensor]:
        """Return the shards of a tensor for ``size`` processes."""
        pieces = [piece.chunk(size, self.dim) for piece in value.chunk(self.parts, self.dim)]
        if len(pieces) == 1:
            return list(pieces[0])
        return [torch.cat([piece[index] for piece in pieces], self.dim) for index in range(size)]

    def join(self, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from its shards."""
        pieces = [share.chunk(self.parts, self.dim) for share in shares]
        return torch.cat([piece for group in zip(*pieces, strict=True) for piece in group], self.dim)


def cut_of(layout: Layout, batch_size: int) -> Cut | None:
    """Return the cut of a layout; None if every process has a tensor of full size (`Replicate`, `Partial`)."""
    return Cut(layout.dim, layout.parts.at(batch_size)) if isinstance(layout, Shard) else None


Layouts = Mapping[Axis, tuple[Layout, ...]]


def own_share(
    value: torch.Tensor, tensor: int, layouts: Layouts, places: Mapping[Axis, int], sharding: Sharding, batch_size: int
) -> torch.Tensor:
    """Return the shard of the whole tensor ``value`` (with this tensor id) for one process.

    ``places``: the index of the process on each axis.
    """
    for axis in SPLITTING_ORDER:
        if axis in layouts and (cut := cut_of(layouts[axis][tensor], batch_size)) is not None:
            value = cut.shares(value, sharding.size(axis))[places[axis]]
    return value


def own_indices(
    shape: Sequence[int], tensor: int, layouts: Layouts, places: Mapping[Axis, int], sharding: Sharding, batch_size: int
) -> list[torch.Tensor]:
    """Return, for each dim of the whole tensor, the indices that one process has. Arguments as in `own_share`."""
    found = [torch.arange(extent) for extent in shape]
    for axis in SPLITTING_ORDER:
        if axis in layouts and (cut := cut_of(layouts[axis][tensor], batch_size)) is not None:
            found[cut.dim] = Cut(0, cut.parts).shares(found[cut.dim], sharding.size(axis))[places[axis]]
    return found


def join_shares(
    shares: Sequence[torch.Tensor], tensor: int, layouts: Layouts, sharding: Sharding, batch_size: int
) -> torch.Tensor:
    """Return the whole tensor from the shards of a team's processes, in the order of their index in the team."""
    found = list(shares)
    # Among the team's places the tensor axis varies fastest.
    for axis in reversed(SPLITTING_ORDER):
        size = sharding.size(axis)
        if size == 1:
            continue
        cut = cut_of(layouts[axis][tensor], batch_size)
        groups = [found[start : start + size] for start in range(0, len(found), size)]
        found = [cut.join(group) if cut is not None else group[0] for group in groups]
    return found[0]


def whole_shape(
    shape: Sequence[int], tensor: int, layouts: Layouts, sharding: Sharding, batch_size: int
) -> tuple[int, ...]:
    """Return the shape of the whole tensor, if one process has a shard of ``shape``."""
    found = list(shape)
    for axis, given in layouts.items():
        if (cut := cut_of(given[tensor], batch_size)) is not None:
            found[cut.dim] *= sharding.size(axis)
    return tuple(found)


def is_split(tensor: int, layouts: Layouts) -> bool:
    """Return whether a tensor is sharded on some axis."""
    return any(isinstance(given[tensor], Shard) for given in layouts.values())


def find_uneven(whole: Graph, local: Graph, layouts: Layouts, sharding: Sharding) -> int | None:
    """Return the id of the first tensor that cannot be sharded evenly over its axes; None if all can."""
    batch_size = whole.batch_size or 2
    samples = batch_size * sharding.size("expert")
    for tensor, (ours, theirs) in enumerate(zip(whole.tensors, local.tensors, strict=False)):
        if theirs.role == "saved":
            continue
        found = whole_shape([extent.at(batch_size) for extent in theirs.shape], tensor, layouts, sharding, batch_size)
        if found != tuple(extent.at(samples) for extent in ours.shape):
            return tensor
    return None
