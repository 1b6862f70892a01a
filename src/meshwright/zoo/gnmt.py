"""GNMT: recurrent encoder and decoder, joined by attention.

    encoder: bidirectional LSTM, then LSTMs; from the third layer on  x = x + lstm(dropout(x))
    decoder: q = lstm(dropout(E[y]));   scores = v · tanh(W q + U encoded + b) / |v| · g;   c = softmax(scores) encoded
             then LSTMs that read (x, c), from the second of them on with the sum, too;   logits = H x

Every layer is recurrent over the whole sequence, so pipeline stages can be cut only between layers. Source: Wu et al.,
"Google's Neural Machine Translation System" (2016), sections 3 and 4, in the form of MLPerf's reference (version 2),
where the attention is that of Bahdanau et al. (2015), normalised, and its context goes to all later layers. Sequences
are full: nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import Batch, random_translations, token_cross_entropy

INITIAL_RANGE = 0.1  # init_weight of MLPerf's reference


@dataclass(frozen=True, slots=True, kw_only=True)
class GNMTShape:
    """The sizes of a GNMT, with ``num_layers`` recurrent layers in each of the encoder and the decoder."""

    source: str
    num_layers: int
    width: int
    vocabulary: int
    dropout: float = 0.2
    batch_size: int
    sequence_length: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.num_layers < 2 or self.width < 1:
            raise ModelReferenceError(
                f"A GNMT of {self.num_layers} layers and width {self.width} was described; expected at least 2 layers "
                "(the first of the encoder is bidirectional, the first of the decoder attends) and a positive width."
            )
        if self.sequence_length < 1:
            raise ModelReferenceError(f"Sequences of {self.sequence_length} tokens were asked for; choose at least 1.")

    def build(self) -> GNMT:
        """Return the model with newly initialised weights."""
        return GNMT(self)

    def batch(self) -> Batch:
        """Return a synthetic batch, all of shape (batch, sequence).

        Inputs: tokens of the encoder and of the decoder. Targets: the decoder's tokens shifted by one.
        """
        return random_translations(self.batch_size, self.sequence_length, self.sequence_length, self.vocabulary)

    loss = staticmethod(token_cross_entropy)


class GNMT(nn.Module):
    """Encoder, attention and decoder; encoder and decoder share one embedding."""

    def __init__(self, shape: GNMTShape) -> None:
        super().__init__()
        width = shape.width
        self.embedding = nn.Embedding(shape.vocabulary, width)
        self.dropout = nn.Dropout(shape.dropout)
        sizes = [(width, True), (2 * width, False)] + [(width, False)] * (shape.num_layers - 2)
        self.encoder = nn.ModuleList(Recurrent(inputs, width, both_ways=both) for inputs, both in sizes)
        self.query = Recurrent(width, width)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(Recurrent(2 * width, width) for _ in range(shape.num_layers - 1))
        self.head = nn.Linear(width, shape.vocabulary)
        for name, parameter in self.named_parameters():
            if not name.startswith("attention.scale"):
                nn.init.uniform_(parameter, -INITIAL_RANGE, INITIAL_RANGE)

    def forward(self, tokens_BT: torch.Tensor, decoder_tokens_BU: torch.Tensor) -> torch.Tensor:
        """Tokens of encoder and decoder (batch, sequence) → logits of the decoder (batch, sequence, vocabulary)."""
        x_BTD = self.dropout(self.embedding(tokens_BT))
        for depth, layer in enumerate(self.encoder):
            y_BTD = layer(x_BTD if depth == 0 else self.dropout(x_BTD))
            x_BTD = x_BTD + y_BTD if depth >= 2 else y_BTD
        y_BUD = self.query(self.dropout(self.embedding(decoder_tokens_BU)))
        context_BUD = self.attention(y_BUD, x_BTD)
        for depth, layer in enumerate(self.decoder):
            z_BUD = layer(self.dropout(torch.cat((y_BUD, context_BUD), dim=-1)))
            y_BUD = y_BUD + z_BUD if depth >= 1 else z_BUD
        return self.head(y_BUD)


class Recurrent(nn.Module):
    """One LSTM layer over a sequence, starting from zero states; a bidirectional one has outputs of twice the width."""

    def __init__(self, num_inputs: int, width: int, *, both_ways: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_inputs, width, batch_first=True, bidirectional=both_ways)

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, inputs) → (batch, sequence, width), or (batch, sequence, 2 · width) if bidirectional."""
        return self.lstm(x_BTI)[0]


class Attention(nn.Module):
    """Additive attention whose vector v is normalised and has a learned length g."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        self.direction = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))

    def forward(self, query_BUD: torch.Tensor, encoded_BTD: torch.Tensor) -> torch.Tensor:
        """Queries (batch, target, width), encoder output (batch, sequence, width) → context (batch, target, width)."""
        sums_BUTD = self.query(query_BUD).unsqueeze(2) + self.key(encoded_BTD).unsqueeze(1) + self.bias
        direction_D = self.direction / self.direction.norm() * self.scale
        scores_BUT = (sums_BUTD.tanh() * direction_D).sum(-1)
        return torch.bmm(scores_BUT.softmax(-1), encoded_BTD)
