"""The pieces of a rank: groups of parameters that the host updates together, on the device and on the host.

A piece is a gradient bucket (or the rank's shard of one), or parameters outside all buckets (`program.host_offload`).
Its number is that in the program's `CopyDown`, `HostStep` and `CopyUp`. On the host each piece has two flat tensors:

    gradients   the target of copies from the device; with master weights, also the source of copies of the new
                parameters
    values      the tensors that the optimizer updates: a copy of the parameters, or their master weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from meshwright.program import Bucket, HostPiece
from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.gradient_reduction import BucketBuffer
from meshwright.runtime.offload.pinned_memory import HostMemory
from meshwright.runtime.optimizer_steps import ShardedBucket
from meshwright.runtime.precisions import gradient_type
from meshwright.spec.precision import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFacts:
    """A piece before it has host memory.

    ``parameters`` by tensor id; ``starts``: the offset of each among the ``size`` elements of the piece.
    ``flat_gradients`` and ``flat_values`` are contiguous tensors on the device, or None. ``mark``: the
    number of the mark that is raised when the gradients of a piece outside all buckets are ready, -1 for a bucket.
    ``is_resident``: parameters and gradients are in host memory already (offload of parameters).
    """

    number: int
    stage: int
    parameters: Mapping[int, torch.Tensor]
    starts: Mapping[int, int]
    size: int
    flat_gradients: torch.Tensor | None = None
    flat_values: torch.Tensor | None = None
    mark: int = -1
    is_resident: bool = False


def find_pieces(
    exchanged: Sequence[tuple[Bucket, BucketBuffer]],
    unsummed: Sequence[tuple[int, HostPiece]],
    updated: Mapping[int, torch.Tensor],
    *,
    are_resident: bool,
) -> list[PieceFacts]:
    """Return the pieces of a rank.

    ``exchanged``: its buckets with their buffers. ``unsummed``: parameters outside all buckets, with the number of the
    piece in the program. ``updated``: the tensors to update, by tensor id. ``are_resident``: those outside all buckets
    are in host memory.
    """
    found = []
    for bucket, buffer in exchanged:
        own = {i: updated[i] for i in bucket.parameters if i in updated}
        if not own:
            continue
        if isinstance(buffer, ShardedBucket):
            origin = buffer.own_values.storage_offset()
            starts = {i: int(item.storage_offset() - origin) for i, item in own.items()}
            flat, values, size = buffer.own_gradients, buffer.own_values, len(buffer.own_values)
        else:
            starts, size = _one_behind_the_other(own)
            flat, values = buffer.flat[:size], None
        found.append(
            PieceFacts(
                number=bucket.index,
                stage=bucket.stages[0],
                parameters=own,
                starts=starts,
                size=size,
                flat_gradients=flat,
                flat_values=values,
            )
        )
    for number, piece in unsummed:
        own = {i: updated[i] for i in piece.parameters}
        starts, size = _one_behind_the_other(own)
        found.append(
            PieceFacts(
                number=number,
                stage=piece.stage,
                parameters=own,
                starts=starts,
                size=size,
                mark=piece.index,
                is_resident=are_resident,
            )
        )
    return found


def _one_behind_the_other(own: Mapping[int, torch.Tensor]) -> tuple[dict[int, int], int]:
    *starts, size = accumulate((own_part(item).numel() for item in own.values()), initial=0)
    return dict(zip(own, starts, strict=True)), size


@dataclass(slots=True)
class HostedPiece:
    """A piece with its host memory.

    ``leaving`` is the tensor that is copied to the device. ``hosted``: the optimizer's parameters by tensor id.
    ``has_masters``: ``values`` are master weights. ``present``: tensor ids of the parameters with a gradient.
    """

    facts: PieceFacts
    gradients: torch.Tensor
    values: torch.Tensor
    leaving: torch.Tensor
    hosted: dict[int, torch.nn.Parameter]
    has_masters: bool
    present: list[int] = field(default_factory=list)
    _views: dict[int, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._views = {} if self.facts.is_resident else {i: self._of(self.gradients, i) for i in self.facts.parameters}

    def find_present(self) -> None:
        """Set ``present`` to the parameters that have a gradient now."""
        self.present = [i for i, item in self.facts.parameters.items() if item.grad is not None]

    def copy_down(self) -> int:
        """Copy the gradients from the device to the host; return the copied bytes."""
        facts = self.facts
        self.find_present()
        if facts.flat_gradients is not None:
            self.gradients.copy_(facts.flat_gradients, non_blocking=True)
            return self.gradients.nbytes
        for i in self.present:
            gradient = facts.parameters[i].grad
            assert gradient is not None, "it was just there"
            self._views[i].copy_(own_part(gradient), non_blocking=True)
        return sum(self._views[i].nbytes for i in self.present)

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients on the host: all of the flat tensor, or the existing ones if they are resident."""
        if not self.facts.is_resident:
            return self.gradients.nbytes
        return sum(self._gradient(i).nbytes for i in self.present)

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients on the host by a factor, in place."""
        gradients = [self._gradient(i) for i in self.present] if self.facts.is_resident else [self.gradients]
        for item in gradients:
            item.mul_(factor.to(item) if isinstance(factor, torch.Tensor) else factor)

    def take_gradients(self) -> list[torch.nn.Parameter]:
        """Set ``.grad`` of the optimizer's parameters; return those that have a gradient."""
        found = [i for i in self.present if i in self.hosted]
        for i in found:
            gradient, hosted = self._gradient(i), self.hosted[i]
            hosted.grad = gradient if gradient.dtype is hosted.dtype else gradient.to(hosted.dtype)
        return [self.hosted[i] for i in found]

    def _gradient(self, tensor: int) -> torch.Tensor:
        if not self.facts.is_resident:
            return self._views[tensor]
        gradient = self.facts.parameters[tensor].grad
        assert gradient is not None, "others are not present"
        return own_part(gradient)

    def narrow(self) -> None:
        """Convert updated master weights to the type of the parameters; nothing without master weights."""
        if self.has_masters and self.facts.is_resident:
            for i, item in self.facts.parameters.items():
                own_part(item.detach()).copy_(self._of(self.values, i))
        elif self.has_masters:
            self.leaving.copy_(self.values)

    def copy_up(self) -> int:
        """Copy the updated parameters to the device; return the copied bytes."""
        facts = self.facts
        if facts.flat_values is not None:
            facts.flat_values.copy_(self.leaving, non_blocking=True)
            return self.leaving.nbytes
        for i, item in facts.parameters.items():
            own_part(item.detach()).copy_(self._of(self.leaving, i), non_blocking=True)
        return self.leaving.nbytes

    def read_values(self) -> None:
        """Copy the device's parameters into ``values``, the optimizer's tensors."""
        if self.facts.is_resident and not self.has_masters:
            return
        self.values.zero_()
        for i, item in self.facts.parameters.items():
            self._of(self.values, i).copy_(own_part(item.detach()))

    def place_values(self, values: torch.Tensor) -> None:
        """Make ``values`` the memory that the optimizer updates; an empty tensor releases that memory."""
        self.values = values
        for i, item in self.hosted.items():
            item.data = self._of(values, i) if values.numel() else values

    def shape_of(self, tensor: int) -> torch.Size:
        """Return the shape of a parameter, or of the rank's shard of it."""
        return own_part(self.facts.parameters[tensor].detach()).shape

    def _of(self, flat: torch.Tensor, tensor: int) -> torch.Tensor:
        item, start = own_part(self.facts.parameters[tensor].detach()), self.facts.starts[tensor]
        return flat[start : start + item.numel()].view(item.shape)


def make_hosted(facts: PieceFacts, numbers: Numbers, memory: HostMemory, *, on_drives: bool) -> HostedPiece:
    """Return a piece with host memory, and with the values of the device's parameters.

    ``on_drives``: `StatesOnDrives` adds the memory of master weights later.
    """
    first = next(iter(facts.parameters.values()))
    is_narrow = bool(numbers.master) and first.dtype is not getattr(torch, numbers.master)
    is_narrow = is_narrow and first.dtype is getattr(torch, numbers.values)
    dtype = getattr(torch, numbers.master) if is_narrow else first.dtype
    size = 0 if is_narrow and on_drives else facts.size
    if facts.is_resident:
        gradients = torch.empty(0, dtype=gradient_type(first))
        values = memory.empty(size if is_narrow else 0, dtype)
        leaving = values
    else:
        gradients = memory.empty(facts.size, gradient_type(first), copied=True)
        values = memory.empty(size, dtype, copied=not is_narrow)
        leaving = gradients.view(first.dtype)[: facts.size] if is_narrow else values
    found = HostedPiece(
        facts=facts, gradients=gradients, values=values, leaving=leaving, hosted={}, has_masters=is_narrow
    )
    if len(values):
        found.read_values()
    lies_apart = is_narrow or not facts.is_resident
    for i, item in facts.parameters.items():
        if item.requires_grad and found.shape_of(i).numel():
            found.hosted[i] = torch.nn.Parameter(values.new_empty(0) if lies_apart else own_part(item.detach()))
    if lies_apart:
        found.place_values(values)
    return found
