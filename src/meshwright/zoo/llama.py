"""Llama: a decoder with rotary positions, RMS norms, grouped queries and a gated perceptron.

    x = E[tokens]
    x = x + attention(rotate(Q), rotate(K), V)(norm(x));  x = x + D(silu(G y) ∗ U y), y = norm(x)    in each block
    logits = W norm(x)

Source: Touvron et al., "LLaMA" (2023), section 2.2; Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3;
rotation: Su et al., "RoFormer" (2021), equation 34, with the two halves of a head as the pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import Batch, random_texts, token_cross_entropy
from meshwright.zoo.checks import check_length

INITIAL_DEVIATION = 0.02  # initializer_range of the published configurations


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryShape:
    """The sizes of a decoder with rotary positions, which Llama and Mixtral share.

    ``num_heads`` heads of queries share ``num_key_value_heads`` heads of keys and values. ``hidden_width`` is that of
    the perceptrons, ``rope_base`` the base of the rotation angles, ``context`` the longest sequence.
    """

    source: str
    num_layers: int
    width: int
    num_heads: int
    num_key_value_heads: int
    hidden_width: int
    vocabulary: int
    context: int
    rope_base: float
    norm_epsilon: float = 1e-5
    batch_size: int
    sequence_length: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_heads, self.num_key_value_heads) < 1 or (
            self.width % (2 * self.num_heads) or self.num_heads % self.num_key_value_heads
        ):
            raise ModelReferenceError(
                f"A {self.family} of {self.num_layers} layers, width {self.width}, {self.num_heads} heads and "
                f"{self.num_key_value_heads} key-value heads was described; expected at least one layer, heads of even "
                "width and a number of heads that the number of key-value heads divides."
            )
        check_length(self.family, self.sequence_length, self.context)

    @property
    def family(self) -> str:
        """Name of the model family in messages: ``Llama``, ``Mixtral``."""
        return type(self).__name__.removesuffix("Shape")

    @property
    def head_width(self) -> int:
        """Width of one attention head: ``width`` / ``num_heads``."""
        return self.width // self.num_heads

    def batch(self) -> Batch:
        """Return a synthetic batch: inputs and targets are tokens (batch, sequence)."""
        return random_texts(self.batch_size, self.sequence_length, self.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape(RotaryShape):
    """The sizes of a Llama."""

    def build(self) -> Llama:
        """Return the model with newly initialised weights."""
        return Llama(self)

    loss = staticmethod(token_cross_entropy)


class RotaryDecoder(nn.Module):
    """Embedding, ``num_layers`` blocks that ``make_block`` makes, norm and head; embedding and head are not tied."""

    def __init__(self, shape: RotaryShape, make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.head_width, self.rope_base = shape.head_width, shape.rope_base
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(make_block() for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def rotations(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines for the positions of the tokens (`rotary_tables`)."""
        return rotary_tables(tokens_BT.shape[1], self.head_width, self.rope_base, tokens_BT.device)


class Llama(RotaryDecoder):
    """The whole model: embedding, blocks, norm and head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, lambda: LlamaBlock(shape))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, sequence) → logits (batch, sequence, vocabulary)."""
        cos_TK, sin_TK = self.rotations(tokens_BT)
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return self.head(self.norm(x_BTD))


class LlamaBlock(nn.Module):
    """Grouped attention and a gated perceptron, each on a normed copy of the residual stream and added to it."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attention = GroupedAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.mlp = GatedMLP(shape)

    def forward(self, x_BTD: torch.Tensor, cos_TK: torch.Tensor, sin_TK: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GroupedAttention(nn.Module):
    """Causal attention in which several heads of queries share one head of keys and values."""

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        key_value_width = shape.num_key_value_heads * shape.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, key_value_width, bias=False)
        self.value = nn.Linear(shape.width, key_value_width, bias=False)
        self.projection = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos_TK: torch.Tensor, sin_TK: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        query, key, value = (
            linear(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed_BHTK = F.scaled_dot_product_attention(
            rotate(query, cos_TK, sin_TK), rotate(key, cos_TK, sin_TK), value, is_causal=True, enable_gqa=True
        )
        return self.projection(mixed_BHTK.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """The SwiGLU perceptron: down(silu(gate(x)) · up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden_width, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden_width, bias=False)
        self.down = nn.Linear(shape.hidden_width, shape.width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def rotary_tables(
    sequence_length: int, head_width: int, base: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of position × base^(-2i / width): two float32 tensors (sequence, width / 2)."""
    exponents_K = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions_T = torch.arange(sequence_length, device=device, dtype=torch.float32)
    angles_TK = torch.outer(positions_T, base**-exponents_K)
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_BHTK: torch.Tensor, cos_TK: torch.Tensor, sin_TK: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (element i of the first half, element i of the second half) by the angle of its position."""
    first, second = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat((first * cos_TK - second * sin_TK, second * cos_TK + first * sin_TK), dim=-1)
    return turned.type_as(x_BHTK)
