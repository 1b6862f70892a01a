"""ModelSource: a module with one example batch and its loss, from the zoo, Hugging Face or a user's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.spec.own_code import own_loss

LossOrigin = Literal["given", "module", "stand-in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that is ready to be captured.

    ``inputs`` is a tuple of positional or a dict of keyword arguments of ``model.forward``; ``targets`` are the further
    arguments of ``loss(outputs, *targets) -> scalar``. The first dim of every tensor in both is the batch.
    ``loss`` is None if the module itself computes the scalar loss (`own_loss`). ``loss_origin`` is "given" if the loss
    came with the model, "module" if the module computes it, and "stand-in" if there was no loss and
    `mean_square_loss` is used. ``reads_bytes``: the model is a language model whose tokens are bytes, so that any text
    can be training data.
    """

    name: str
    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    targets: tuple[Any, ...] = ()
    loss: Callable[..., torch.Tensor] | None = None
    loss_origin: LossOrigin = "given"
    reads_bytes: bool = False

    @property
    def batch_size(self) -> int:
        """Number of samples in the example batch."""
        return first_tensor(self.inputs).shape[0]

    def compute_loss(self) -> torch.Tensor:
        """Run the model on its example batch, and return the scalar loss."""
        outputs = call_forward(self.model, self.inputs)
        return own_loss(outputs) if self.loss is None else self.loss(outputs, *self.targets)


def call_forward(model: nn.Module, inputs: tuple[Any, ...] | dict[str, Any]) -> Any:
    """Call a module with a batch: a tuple of positional or a dict of keyword arguments."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def first_tensor(batch: Any) -> torch.Tensor:
    """Return the first tensor of a batch that has at least one dim; every ModelSource has such a tensor."""
    return next(item for item in pytree.tree_leaves(batch) if isinstance(item, torch.Tensor) and item.ndim)


def mean_square_loss(outputs: Any) -> torch.Tensor:
    """Return the stand-in loss: the mean square of each floating output, averaged over the outputs."""
    floating = [item for item in pytree.tree_leaves(outputs) if is_floating_tensor(item)]
    return torch.stack([item.square().mean() for item in floating]).mean()


def is_floating_tensor(item: Any) -> bool:
    """Return whether a value is a tensor of a real floating dtype."""
    return isinstance(item, torch.Tensor) and item.is_floating_point()
