"""Synthetic batches and their losses, for the models of the zoo.

Random numbers come from torch's global generator, which the caller seeds. All losses here are cross-entropies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NUM_COLOURS = 3  # an image has three colour channels


# Inputs and targets.
Batch = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def random_tokens(batch_size: int, sequence_length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, and the same sequences shifted by one token: two int64 tensors (batch, sequence)."""
    tokens = torch.randint(vocabulary, (batch_size, sequence_length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def random_texts(batch_size: int, sequence_length: int, vocabulary: int) -> Batch:
    """Return a batch for a decoder: (inputs, targets), tokens of shape (batch, sequence) from `random_tokens`."""
    tokens, targets = random_tokens(batch_size, sequence_length, vocabulary)
    return (tokens,), (targets,)


def random_translations(batch_size: int, sequence_length: int, target_length: int, vocabulary: int) -> Batch:
    """Return a batch for an encoder and a decoder.

    Inputs: tokens of the encoder (batch, sequence) and of the decoder (batch, target). Targets: the decoder's tokens
    shifted by one (batch, target).
    """
    tokens = torch.randint(vocabulary, (batch_size, sequence_length))
    decoder_tokens, targets = random_tokens(batch_size, target_length, vocabulary)
    return (tokens, decoder_tokens), (targets,)


def random_images(batch_size: int, image_size: int) -> torch.Tensor:
    """Return images of normal noise: a float tensor (batch, 3, size, size)."""
    return torch.randn(batch_size, NUM_COLOURS, image_size, image_size)


def token_cross_entropy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens.

    Logits have the shape (batch, sequence, vocabulary), targets (batch, sequence).
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits (batch, classes, ...) and targets (batch, ...)."""
    return F.cross_entropy(logits, targets)
