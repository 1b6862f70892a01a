"""GPT: a decoder of pre-norm blocks with learned positions and an embedding that is also the head.

    x = E[tokens] + P[0..T)
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each of L blocks
    logits = norm(x) Eᵀ

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019): shapes in table 2, normal
initial weights of deviation 0.02, those of the residual projections divided by √(2L) (section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.zoo.batch_examples import Batch, random_texts, token_cross_entropy
from meshwright.zoo.checks import check_heads, check_length

INITIAL_DEVIATION = 0.02  # GPT-2's


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """The sizes of a GPT; ``context`` is the number of positions, ``dropout`` is applied where GPT-2 does."""

    source: str
    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    context: int
    dropout: float = 0.0
    batch_size: int
    sequence_length: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_heads("GPT", num_layers=self.num_layers, width=self.width, num_heads=self.num_heads)
        check_length("GPT", self.sequence_length, self.context)

    def build(self) -> GPT:
        """Return the model with newly initialised weights."""
        return GPT(self)

    def batch(self) -> Batch:
        """Return a synthetic batch: inputs and targets are tokens (batch, sequence)."""
        return random_texts(self.batch_size, self.sequence_length, self.vocabulary)

    loss = staticmethod(token_cross_entropy)


class GPT(nn.Module):
    """Embeddings, blocks and the head, whose weight is the token embedding."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(GPTBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        initialise(self, shape.num_layers)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, sequence) → logits (batch, sequence, vocabulary)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.embedding(tokens_BT) + self.position(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class GPTBlock(nn.Module):
    """Causal attention and a perceptron, each applied to a normed copy of the residual stream and added to it."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = CausalAttention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class CausalAttention(nn.Module):
    """Self-attention in which every token attends to itself and to earlier tokens."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, shape.dropout
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.output_dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        dropout = self.dropout if self.training else 0.0
        mixed_BTD = self_attention(self.query_key_value(x_BTD), self.num_heads, dropout, is_causal=True)
        return self.output_dropout(self.projection(mixed_BTD))


class MLP(nn.Module):
    """A perceptron: a linear layer to four times the width, GELU, and a linear layer back."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.projection = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        return self.dropout(self.projection(F.gelu(self.widen(x_BTD), approximate="tanh")))


def self_attention(
    query_key_value_BT3D: torch.Tensor, num_heads: int, dropout: float, *, is_causal: bool = False
) -> torch.Tensor:
    """Queries, keys and values in one tensor (batch, sequence, 3 · width) → attention (batch, sequence, width)."""
    query, key, value = (
        part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in query_key_value_BT3D.chunk(3, dim=-1)
    )
    mixed_BHTK = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, dropout_p=dropout)
    return mixed_BHTK.transpose(1, 2).flatten(2)


def initialise(model: nn.Module, num_layers: int) -> None:
    """Set GPT-2's initial weights, in place: normal matrices, zero biases; norms keep ones and zeros.

    Weights of residual projections are divided by √(2 · ``num_layers``).
    """
    for name, parameter in model.named_parameters():
        if name.endswith("projection.weight"):
            nn.init.normal_(parameter, std=INITIAL_DEVIATION / (2 * num_layers) ** 0.5)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=INITIAL_DEVIATION)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
