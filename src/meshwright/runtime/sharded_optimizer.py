"""Replicas that shard optimizer states (ZeRO 1): each updates its part of every bucket.

The parameters of a bucket are in one flat buffer, padded to equal parts, as their gradients are. Gradients are
reduce-scattered, the optimizer updates the pieces of parameters in its own part, and the parts are all-gathered while
the next step starts. An update must treat each element by itself: the optimizer is tested for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from meshwright.program import Bucket, cut_pieces
from meshwright.program.parts import Parts
from meshwright.runtime.exchange import BucketBuffer, BucketExchange
from meshwright.runtime.precisions import set_gradient_type
from meshwright.spec.errors import PlanError
from meshwright.torch_names import all_gather_single, reduce_scatter_single


class ShardedBucket(BucketBuffer):
    """A bucket of which this rank has the part at a ``place`` among ``count``.

    ``pieces`` are the parts of its parameters in that, by tensor id; ``values`` is the flat buffer of all.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter], place: int, count: int) -> None:
        super().__init__(bucket, parameters, count)
        self.tensors = bucket.parameters
        self.values = torch.zeros_like(self.flat, dtype=parameters[0].dtype if parameters else None)
        size = len(self.flat) // count
        self.own_values = self.values.narrow(0, place * size, size)
        # Sums overwrite the own gradients: NCCL allows that, and gloo sums in memory of its own.
        self.own_gradients = self.flat.narrow(0, place * size, size)
        self.pieces: dict[int, torch.nn.Parameter] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        sizes = [parameter.numel() for parameter in parameters]
        whole = self.values[: sum(sizes)].split(sizes)
        for tensor, parameter, value, own in zip(
            bucket.parameters, parameters, whole, cut_pieces(sizes, place, count), strict=True
        ):
            value.copy_(parameter.detach().reshape(-1))
            parameter.data = value.view(parameter.shape)
            if own:
                self.pieces[tensor] = torch.nn.Parameter(self.own_values[own.start : own.stop])
                set_gradient_type(self.pieces[tensor], self.flat.dtype)
                self._gradients[tensor] = self.own_gradients[own.start : own.stop]

    def scatter(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """Reduce-scatter the gradients over the group."""
        # A parameter without a gradient has none on any replica.
        absent = {i for i, parameter in zip(self.tensors, self.parameters, strict=True) if parameter.grad is None}
        for tensor, piece in self.pieces.items():
            piece.grad = self._gradients[tensor] if tensor not in absent else None
        return reduce_scatter_single(self.own_gradients, self.flat, group=group, async_op=True)

    def gather(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """All-gather the updated parts; gradients are no longer needed."""
        for parameter in self.parameters:
            parameter.grad = None
        # Not every backend can gather into the memory that it sends.
        own = self.own_values.clone()
        return all_gather_single(self.values, own, group=group, async_op=True)


class ShardedBuckets(BucketExchange):
    """The buckets of a rank that updates its part of each."""

    def __init__(self, buckets: Sequence[ShardedBucket], parts: Parts) -> None:
        super().__init__(buckets, parts)
        self.sharded = {bucket.index: bucket for bucket in buckets}

    def to_sum(self, part: int) -> torch.Tensor:
        """The tensor that groups of replicas sum with each other: the own part of a bucket."""
        return self.sharded[part].own_gradients

    def pieces(self, parameters: dict[int, torch.nn.Parameter]) -> dict[int, torch.nn.Parameter]:
        """The parts of a rank's parameters that it updates, by tensor id: its pieces, and parameters in no bucket."""
        shared = {id(parameter) for bucket in self.sharded.values() for parameter in bucket.parameters}
        own = {tensor: parameter for tensor, parameter in parameters.items() if id(parameter) not in shared}
        for bucket in self.sharded.values():
            own |= bucket.pieces
        return {tensor: own[tensor] for tensor in parameters if tensor in own}


def check_elementwise(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise PlanError if an optimizer updates a tensor differently than its pieces, tested on small tensors."""
    if optimizer is not None:
        # In a dry run, too, the test uses real tensors.
        with unset_fake_temporarily():
            _try_pieces(optimizer)


def _try_pieces(optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 6, 4, generator=generator, dtype=torch.float64)
    whole = torch.nn.Parameter(start.clone())
    pieces = [torch.nn.Parameter(item.clone()) for item in start.flatten().split((9, 15))]
    name = type(optimizer).__name__
    try:
        make: Callable[..., torch.optim.Optimizer] = type(optimizer)
        accepted = inspect.signature(make).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        optimizers = make([whole], **options), make(pieces, **options)
        for gradient in gradients:
            whole.grad = gradient.clone()
            for piece, value in zip(pieces, gradient.flatten().split((9, 15)), strict=True):
                piece.grad = value.clone()
            for item in optimizers:
                item.step()
    except Exception as error:
        raise PlanError(
            f"The plan shards the states of the optimizer (--zero 1), so that it updates pieces of parameters; "
            f"{name} failed on such pieces: {error} Choose another optimizer, or plan with --zero 0."
        ) from None
    if not torch.allclose(
        torch.cat([piece.detach() for piece in pieces]), whole.detach().flatten(), rtol=1e-9, atol=0.0
    ):
        raise PlanError(
            f"The plan shards the states of the optimizer (--zero 1), so that it updates pieces of parameters; "
            f"{name} updates a tensor differently than its pieces. Choose an optimizer that treats each element by "
            "itself, such as AdamW, or plan with --zero 0."
        )
