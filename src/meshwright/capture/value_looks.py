"""Descriptions of a graph's tensors, without data.

A `ValueLooks` is a tensor's shape, strides, dtype and ``requires_grad``. A `Slot` is one tensor of a walk through a
graph: a `ValueLooks` and the number of its storage. Tensors that share memory have the same storage number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class ValueLooks:
    """Shape, strides, dtype and ``requires_grad`` of a tensor: all that operators depend on, except data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ValueLooks:
        """Return the description of a real or fake tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def differentiable(self) -> bool:
        """True if tensors of this dtype (floating-point or complex) can require a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self) -> torch.Tensor:
        """Return an uninitialised leaf tensor on the CPU with these properties; call it under a fake mode."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        return tensor.requires_grad_(self.requires_grad)

    def with_batch(self, batch_size: int) -> ValueLooks:
        """Return the same description with ``batch_size`` as the size of dim 0."""
        shape = (batch_size, *self.shape[1:])
        # Strides do not depend on the batch where dim 0 is the outermost; otherwise a batch of another size is taken as
        # contiguous.
        outermost = all(self.stride[0] >= stride for stride in self.stride[1:])
        stride = self.stride if outermost else torch.empty(shape, device="meta").stride()
        return replace(self, shape=shape, stride=tuple(stride))


@dataclass(slots=True, eq=False)
class Slot:
    """One tensor of a walk; ``storage`` is the number of its memory.

    ``value`` is replaced if a later in-place write makes the tensor require a gradient.
    """

    value: ValueLooks
    storage: int
