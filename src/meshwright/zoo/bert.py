"""BERT: an encoder of post-norm blocks, trained to fill in masked tokens and to tell whether its two segments belong.

    x = norm(E[tokens] + P[0..T) + S[segments])
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each of L blocks
    token logits = norm(gelu(W x_m)) Eᵀ + b for the masked positions m only;  pair logits = V tanh(U x_0)

Sequences are full, so attention needs no mask of padding. Source: Devlin et al., "BERT" (2019): sizes in section 3,
15 % of the tokens masked (section 3.1), initial weights and dropout as in its published code (google-research/bert,
modeling.py), which gathers the masked positions before the head, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.zoo.batch_examples import Batch
from meshwright.zoo.checks import check_heads, check_length
from meshwright.zoo.gpt import self_attention

INITIAL_DEVIATION = 0.02  # initializer_range of the published configurations
NORM_EPSILON = 1e-12  # tf.contrib.layers.layer_norm, which the published code calls
NUM_SEGMENTS = 2
MASKED_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class BERTShape:
    """The sizes of a BERT; ``context`` is the number of positions. 15 % of each sequence's tokens are masked."""

    source: str
    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    context: int
    dropout: float = 0.1
    batch_size: int
    sequence_length: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_heads("BERT", num_layers=self.num_layers, width=self.width, num_heads=self.num_heads)
        check_length("BERT", self.sequence_length, self.context)

    @property
    def num_masked(self) -> int:
        """Number of masked tokens in a sequence: 15 %, rounded up."""
        return math.ceil(MASKED_SHARE * self.sequence_length)

    def build(self) -> BERT:
        """Return the model with newly initialised weights."""
        return BERT(self)

    def batch(self) -> Batch:
        """Return a synthetic batch.

        Inputs: tokens and segments (batch, sequence), masked positions (batch, masked). Targets: the tokens at the
        masked positions (batch, masked), and whether the two segments belong together (batch,).
        """
        tokens_BT = torch.randint(self.vocabulary, (self.batch_size, self.sequence_length))
        starts_B1 = torch.randint(1, self.sequence_length + 1, (self.batch_size, 1))
        segments_BT = (torch.arange(self.sequence_length) >= starts_B1).long()
        positions_BM = torch.rand(self.batch_size, self.sequence_length).argsort(1)[:, : self.num_masked].contiguous()
        masked_BM = torch.randint(self.vocabulary, (self.batch_size, self.num_masked))
        return (tokens_BT, segments_BT, positions_BM), (masked_BM, torch.randint(2, (self.batch_size,)))

    @staticmethod
    def loss(
        outputs: tuple[torch.Tensor, torch.Tensor], masked_BM: torch.Tensor, pairs_B: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean cross-entropy of the masked tokens plus that of the pairs of segments."""
        token_logits_BMV, pair_logits_B2 = outputs
        return F.cross_entropy(token_logits_BMV.flatten(0, 1), masked_BM.flatten()) + F.cross_entropy(
            pair_logits_B2, pairs_B
        )


class BERT(nn.Module):
    """The encoder, the head for masked tokens (tied to the embedding), and the head for pairs of segments."""

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.segment = nn.Embedding(NUM_SEGMENTS, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(BERTBlock(shape) for _ in range(shape.num_layers))
        self.transform = nn.Linear(shape.width, shape.width)
        self.transform_norm = nn.LayerNorm(shape.width, eps=NORM_EPSILON)
        self.head = nn.Linear(shape.width, shape.vocabulary)
        self.head.weight = self.embedding.weight
        self.pool = nn.Linear(shape.width, shape.width)
        self.pair_head = nn.Linear(shape.width, 2)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.get_parameter("bias"))

    def forward(
        self, tokens_BT: torch.Tensor, segments_BT: torch.Tensor, positions_BM: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and segments (batch, sequence), masked positions (batch, masked) → logits of tokens and of pairs.

        The logits have the shapes (batch, masked, vocabulary) and (batch, 2).
        """
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embedding(tokens_BT) + self.position(places_T) + self.segment(segments_BT)
        x_BTD = self.dropout(self.norm(x_BTD))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        masked_BMD = x_BTD.gather(1, positions_BM.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1]))
        token_logits_BMV = self.head(self.transform_norm(F.gelu(self.transform(masked_BMD))))
        return token_logits_BMV, self.pair_head(self.pool(x_BTD[:, 0]).tanh())


class BERTBlock(nn.Module):
    """Attention over the whole sequence, then a perceptron; each is added to its input, and the sum is normed."""

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, shape.dropout
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.attention_norm = nn.LayerNorm(shape.width, eps=NORM_EPSILON)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width, eps=NORM_EPSILON)
        self.output_dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) → (batch, sequence, width)."""
        x_BTD = self.attention_norm(x_BTD + self.output_dropout(self.attend(x_BTD)))
        return self.mlp_norm(x_BTD + self.output_dropout(self.narrow(F.gelu(self.widen(x_BTD)))))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Self-attention alone, (batch, sequence, width) → (batch, sequence, width), without adding the input."""
        dropout = self.dropout if self.training else 0.0
        return self.projection(self_attention(self.query_key_value(x_BTD), self.num_heads, dropout))
