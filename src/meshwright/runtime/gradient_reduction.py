"""Gradient buckets of one rank: flat buffers that collect the gradients, are summed, and are read by the optimizer.

In the first backward of a step each parameter's hook copies its gradient into the bucket's flat buffer, while the
gradient is still in the cache. From then on ``.grad`` is a view of the buffer, to which autograd adds the gradients of
further microbatches, so that gradients are in memory once. In the last backward a bucket is summed when it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from meshwright.program import Bucket
from meshwright.program.buckets import Parts
from meshwright.runtime.precisions import gradient_type


class Exchange(Protocol):
    """The gradient buckets of a rank, each summed over its replicas whole or in parts (`program.buckets`)."""

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """The flat tensors of the buckets."""

    @property
    def stages(self) -> Mapping[int, Collection[int]]:
        """By bucket index, the stages whose gradients are in the bucket."""

    def begin(self, buckets: Collection[int], on_ready: Callable[[int], None]) -> None:
        """Start the last backward that fills these buckets; ``on_ready(part)`` is called when a part can be summed."""

    def finish(self) -> None:
        """End the last backward; all parts of its buckets can be summed."""

    def to_sum(self, part: int) -> torch.Tensor:
        """Return the tensor of a part of a bucket, to be summed in place."""

    def merge(self) -> None:
        """Add the oldest summed changes of weights (`opening.WaveExchange`); other exchanges do nothing."""

    def restart(self) -> None:
        """Reset after all instructions have ended; training continues from the current weights."""

    def close(self) -> None:
        """Remove all hooks from the user's parameters."""


class BucketBuffer:
    """One bucket: the flat buffer ``flat``, padded to a ``multiple`` of elements, and a view of it per parameter."""

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter], multiple: int = 1) -> None:
        self.index = bucket.index
        self.stages = bucket.stages
        self.parameters = list(parameters)
        total = sum(parameter.numel() for parameter in self.parameters)
        # If gradients are summed inside of backwards, the replicas of a stage synchronise in an empty bucket.
        first = self.parameters[0] if self.parameters else torch.empty(0)
        self.flat = torch.zeros(-(-total // multiple) * multiple, dtype=gradient_type(first), device=first.device)
        self.views = [
            piece.view(parameter.shape)
            for piece, parameter in zip(
                self.flat[:total].split([parameter.numel() for parameter in self.parameters]),
                self.parameters,
                strict=True,
            )
        ]
        self.missing = 0


class BucketExchange:
    """Fills the buckets of a rank. A bucket can be summed once it and all buckets before it are full.

    Each stage of the rank has its own buckets. A bucket with parameters of several stages is final after the last
    backward of these stages.
    """

    def __init__(self, buckets: Sequence[BucketBuffer], parts: Parts) -> None:
        self._buckets = list(buckets)
        self._parts = {item.index: range(*parts.offsets[item.index : item.index + 2]) for item in buckets}
        self._to_sum = {
            part: item.flat[parts.start[part] : parts.stop[part]]
            for item in buckets
            for part in self._parts[item.index]
        }
        self._on_ready: Callable[[int], None] = lambda _: None
        self._filling: list[BucketBuffer] = []
        self._next = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, place))
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        ]

    @property
    def filled(self) -> list[BucketBuffer]:
        """The buckets of this rank."""
        return self._buckets

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers of the buckets."""
        return [item.flat for item in self._buckets]

    @property
    def stages(self) -> dict[int, tuple[int, ...]]:
        """By bucket index, the stages whose gradients are in the bucket."""
        return {item.index: item.stages for item in self._buckets}

    def begin(self, buckets: Collection[int], on_ready: Callable[[int], None]) -> None:
        """Start the last backward that fills these buckets; ``on_ready(part)`` is called when a part can be summed."""
        self._on_ready = on_ready
        self._filling = [item for item in self._buckets if item.index in buckets]
        self._next = 0
        for bucket in self._filling:
            bucket.missing = len(bucket.parameters)

    def finish(self) -> None:
        """End the last backward. Parameters that it did not reach contribute the gradient that they have, or zero."""
        for bucket in self._filling[self._next :]:
            for place, parameter in enumerate(bucket.parameters):
                if parameter.grad is not bucket.views[place]:
                    self._collect(bucket, place, parameter)
            bucket.missing = 0
        self._raise_marks()
        self._filling = []

    def to_sum(self, part: int) -> torch.Tensor:
        """Return the slice of a flat buffer that is this part of a bucket."""
        return self._to_sum[part]

    def merge(self) -> None:
        """Do nothing: gradients are summed in the buffers that the optimizer reads."""

    def restart(self) -> None:
        """Do nothing: no state lasts longer than a step."""

    def close(self) -> None:
        """Remove the hooks from the user's parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, bucket: BucketBuffer, place: int) -> Callable[[torch.Tensor], None]:
        view = bucket.views[place]

        def collect(parameter: torch.Tensor) -> None:
            if parameter.grad is not view:
                self._collect(bucket, place, parameter)
            if bucket in self._filling:
                bucket.missing -= 1
                if not bucket.missing:
                    self._raise_marks()

        return collect

    def _collect(self, bucket: BucketBuffer, place: int, parameter: torch.Tensor) -> None:
        view = bucket.views[place]
        if parameter.grad is None:
            view.zero_()
            if len(bucket.stages) == 1:
                # All replicas run the same ops, so no replica has a gradient: the optimizer must see that.
                return
        else:
            view.copy_(parameter.grad)
        parameter.grad = view

    def _raise_marks(self) -> None:
        while self._next < len(self._filling) and not self._filling[self._next].missing:
            for part in self._parts[self._filling[self._next].index]:
                self._on_ready(part)
            self._next += 1
