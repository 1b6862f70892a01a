"""LoRA: a Llama whose weights are frozen, with small trainable adapters next to its linear layers.

    y = W x + (α / r) B A dropout(x);   A: r × inputs, B: outputs × r, B = 0 at first;   only A and B are trained

Optimizer states, gradients and their exchange exist for the adapters alone; the backward pass still goes through all
blocks, because the first one has adapters, too. Source: Hu et al., "LoRA" (2021), equation 3 and section 4.1; initial
A: the published code (microsoft/LoRA, loralib/layers.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.spec import ModelReferenceError, suggest
from meshwright.zoo.llama import Llama, LlamaShape

# The linear layers of a block: those of attention, then those of the perceptron.
LINEARS = ("query", "key", "value", "projection", "gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAShape(LlamaShape):
    """The sizes of a Llama and of its adapters: ``rank`` r, ``alpha`` α; ``adapted`` names the adapted layers."""

    rank: int
    alpha: float
    adapted: tuple[str, ...] = LINEARS
    adapter_dropout: float = 0.0

    def __post_init__(self) -> None:
        LlamaShape.__post_init__(self)
        if self.rank < 1 or not self.adapted:
            raise ModelReferenceError(
                f"Adapters of rank {self.rank} for {len(self.adapted)} linear layers of a block were described; "
                "expected a rank of at least 1, and at least 1 layer."
            )
        for name in self.adapted:
            if name not in LINEARS:
                raise ModelReferenceError(
                    f"Adapters for {name!r} were described, but a block has no such linear layer"
                    f"{suggest(name, LINEARS)}. Choose from {', '.join(LINEARS)}."
                )

    def build(self) -> Llama:
        """Return the model with newly initialised weights; only its adapters require gradients."""
        return add_adapters(Llama(self), self)


class AdaptedLinear(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear, shape: LoRAShape) -> None:
        super().__init__()
        self.base, self.scale = base, shape.alpha / shape.rank
        self.dropout = nn.Dropout(shape.adapter_dropout)
        self.reduce = nn.Linear(base.in_features, shape.rank, bias=False)
        self.expand = nn.Linear(shape.rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.reduce.weight, a=math.sqrt(5))
        nn.init.zeros_(self.expand.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) → (..., outputs)."""
        return self.base(x) + self.scale * self.expand(self.reduce(self.dropout(x)))


def add_adapters(model: Llama, shape: LoRAShape) -> Llama:
    """Freeze a model and replace the ``adapted`` linear layers of its blocks by `AdaptedLinear`, in place."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in shape.adapted:
            owner = block.attention if hasattr(block.attention, name) else block.mlp
            setattr(owner, name, AdaptedLinear(getattr(owner, name), shape))
    return model
