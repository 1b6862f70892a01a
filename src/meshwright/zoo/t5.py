"""T5: encoder and decoder of pre-norm blocks whose attention has a learned bias by the distance of two tokens.

    scores = Q Kᵀ + B[bucket(j − i)]       encoder and decoder have one table B each; not scaled by √K
    encoder: x = x + attention(norm(x)); x = x + mlp(norm(x))
    decoder: the same with causal attention, and between the two  x = x + attend(norm(x), encoded)
    logits = norm(x) Eᵀ / √D

Distances fall into buckets: half of the buckets hold one distance each, the others grow logarithmically up to the last
one. The encoder has separate buckets, half of them each, for earlier and later tokens. Norms are RMS norms, no linear
layer has a bias. Source: Raffel et al., "Exploring the Limits of Transfer Learning" (2020), section 2.1 and appendix;
scales and initial weights: its published code (google-research/text-to-text-transfer-transformer, Mesh TensorFlow's
transformer layers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import Batch, random_translations, token_cross_entropy

NORM_EPSILON = 1e-6  # layer_norm_epsilon of the published code


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Shape:
    """The sizes of a T5: ``num_layers`` blocks in each of encoder and decoder.

    The encoder reads ``sequence_length`` tokens, the decoder ``target_length``. ``num_buckets`` and ``max_distance``
    belong to the relative positions, which the module's docstring describes.
    """

    source: str
    num_layers: int
    width: int
    head_width: int
    num_heads: int
    hidden_width: int
    vocabulary: int
    num_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.1
    batch_size: int
    sequence_length: int
    target_length: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_heads, self.head_width, self.hidden_width) < 1:
            raise ModelReferenceError(
                f"A T5 of {self.num_layers} layers, {self.num_heads} heads of {self.head_width} and hidden width "
                f"{self.hidden_width} was described; expected at least 1 of each."
            )
        if self.num_buckets < 4 or self.num_buckets % 4 or self.max_distance <= self.num_buckets // 2:
            raise ModelReferenceError(
                f"A T5 with {self.num_buckets} buckets up to a distance of {self.max_distance} was described; expected "
                "a number of buckets that is a multiple of 4, and a distance of more than half of it."
            )
        if min(self.sequence_length, self.target_length) < 1:
            raise ModelReferenceError(
                f"Sequences of {self.sequence_length} tokens in and {self.target_length} out were asked for; "
                "choose at least 1 for both."
            )

    def build(self) -> T5:
        """Return the model with newly initialised weights."""
        return T5(self)

    def batch(self) -> Batch:
        """Return a synthetic batch.

        Inputs: tokens of the encoder (batch, sequence) and of the decoder (batch, target). Targets: the decoder's
        tokens shifted by one (batch, target).
        """
        return random_translations(self.batch_size, self.sequence_length, self.target_length, self.vocabulary)

    loss = staticmethod(token_cross_entropy)


class T5(nn.Module):
    """Encoder and decoder; both and the output head share one embedding matrix."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.scale = shape.width**-0.5
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.encoder_bias = RelativeBias(shape, causal=False)
        self.encoder = nn.ModuleList(EncoderBlock(shape) for _ in range(shape.num_layers))
        self.encoder_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.decoder_bias = RelativeBias(shape, causal=True)
        self.decoder = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.num_layers))
        self.decoder_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: torch.Tensor, decoder_tokens_BU: torch.Tensor) -> torch.Tensor:
        """Tokens of encoder (batch, sequence) and decoder (batch, target) → logits (batch, target, vocabulary)."""
        bias_1HTT = self.encoder_bias(tokens_BT.shape[1])
        x_BTD = self.dropout(self.embedding(tokens_BT))
        for block in self.encoder:
            x_BTD = block(x_BTD, bias_1HTT)
        encoded_BTD = self.dropout(self.encoder_norm(x_BTD))
        bias_1HUU = self.decoder_bias(decoder_tokens_BU.shape[1])
        y_BUD = self.dropout(self.embedding(decoder_tokens_BU))
        for block in self.decoder:
            y_BUD = block(y_BUD, encoded_BTD, bias_1HUU)
        return self.head(self.dropout(self.decoder_norm(y_BUD)) * self.scale)


class RelativeBias(nn.Module):
    """The bias added to the scores of every head, by the distance of two tokens; minus infinity ahead if causal."""

    def __init__(self, shape: T5Shape, *, causal: bool) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.causal = shape.num_buckets, shape.max_distance, causal
        self.table = nn.Embedding(shape.num_buckets, shape.num_heads)
        nn.init.normal_(self.table.weight, std=shape.width**-0.5)

    def forward(self, length: int) -> torch.Tensor:
        """Return the bias (1, heads, length, length) for sequences of ``length`` tokens."""
        places_T = torch.arange(length, device=self.table.weight.device)
        ahead_TT = places_T - places_T.unsqueeze(1)
        bias_1HTT = self.table(self.buckets(ahead_TT)).permute(2, 0, 1).unsqueeze(0)
        return bias_1HTT.masked_fill(ahead_TT > 0, -torch.inf) if self.causal else bias_1HTT

    def buckets(self, ahead_TT: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each distance (position of the key minus position of the query)."""
        num_buckets = self.num_buckets
        first_TT, distance_TT = torch.zeros_like(ahead_TT), (-ahead_TT).clamp(min=0)
        if not self.causal:
            num_buckets //= 2
            first_TT, distance_TT = (ahead_TT > 0) * num_buckets, ahead_TT.abs()
        exact = num_buckets // 2
        growth = (num_buckets - exact) / math.log(self.max_distance / exact)
        far_TT = exact + ((distance_TT.clamp(min=1) / exact).log() * growth).long()
        return first_TT + torch.where(distance_TT < exact, distance_TT, far_TT.clamp(max=num_buckets - 1))


class EncoderBlock(nn.Module):
    """Attention and a perceptron, each applied to a normed copy of the residual stream and added to it."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.attention = BiasedAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.mlp = Perceptron(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: torch.Tensor, bias_1HTT: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        y_BTD = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.dropout(self.attention(y_BTD, y_BTD, bias_1HTT))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's output, and a perceptron, each added to the residual stream."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.attention = BiasedAttention(shape)
        self.cross_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.cross = BiasedAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.mlp = Perceptron(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BUD: torch.Tensor, encoded_BTD: torch.Tensor, bias_1HUU: torch.Tensor) -> torch.Tensor:
        """(batch, target, width), (batch, sequence, width) → (batch, target, width)."""
        y_BUD = self.attention_norm(x_BUD)
        x_BUD = x_BUD + self.dropout(self.attention(y_BUD, y_BUD, bias_1HUU))
        x_BUD = x_BUD + self.dropout(self.cross(self.cross_norm(x_BUD), encoded_BTD, None))
        return x_BUD + self.dropout(self.mlp(self.mlp_norm(x_BUD)))


class BiasedAttention(nn.Module):
    """Attention whose scores get a bias (`RelativeBias`) and are not scaled."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.head_width, self.dropout = shape.head_width, shape.dropout
        inner = shape.num_heads * shape.head_width
        self.query = nn.Linear(shape.width, inner, bias=False)
        self.key = nn.Linear(shape.width, inner, bias=False)
        self.value = nn.Linear(shape.width, inner, bias=False)
        self.projection = nn.Linear(inner, shape.width, bias=False)
        nn.init.normal_(self.query.weight, std=(shape.width * shape.head_width) ** -0.5)
        for linear in (self.key, self.value):
            nn.init.normal_(linear.weight, std=shape.width**-0.5)
        nn.init.normal_(self.projection.weight, std=inner**-0.5)

    def forward(self, x_BUD: torch.Tensor, memory_BTD: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Queries (batch, target, width), keys and values (batch, sequence, width) → (batch, target, width)."""
        query, key, value = (
            linear(source).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear, source in ((self.query, x_BUD), (self.key, memory_BTD), (self.value, memory_BTD))
        )
        dropout = self.dropout if self.training else 0.0
        mixed_BHUK = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return self.projection(mixed_BHUK.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """A perceptron: a linear layer to the hidden width, ReLU, and a linear layer back."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.widen = nn.Linear(shape.width, shape.hidden_width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)
        self.narrow = nn.Linear(shape.hidden_width, shape.width, bias=False)
        nn.init.normal_(self.widen.weight, std=shape.width**-0.5)
        nn.init.normal_(self.narrow.weight, std=shape.hidden_width**-0.5)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        return self.narrow(self.dropout(F.relu(self.widen(x_BTD))))
