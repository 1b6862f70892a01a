"""Synthetic batches and the losses that go with them; random numbers come from torch's generator, as the caller set it.

Source of the loss: cross-entropy, for tokens, images and pixels alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NUM_COLOURS = 3  # an image has three colour channels


# Inputs and targets.
Batch = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def random_tokens(batch_size: int, sequence_length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token sequences and the same moved by one: two int64 tensors (batch, sequence)."""
    tokens = torch.randint(vocabulary, (batch_size, sequence_length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def random_texts(batch_size: int, sequence_length: int, vocabulary: int) -> Batch:
    """Return a batch for a decoder: `random_tokens` as inputs and targets."""
    tokens, targets = random_tokens(batch_size, sequence_length, vocabulary)
    return (tokens,), (targets,)


def random_translations(batch_size: int, sequence_length: int, target_length: int, vocabulary: int) -> Batch:
    """Return a batch for encoder and decoder: tokens (batch, sequence), then `random_tokens` (batch, target)."""
    tokens = torch.randint(vocabulary, (batch_size, sequence_length))
    decoder_tokens, targets = random_tokens(batch_size, target_length, vocabulary)
    return (tokens, decoder_tokens), (targets,)


def random_images(batch_size: int, image_size: int) -> torch.Tensor:
    """Normal noise: a float tensor (batch, 3, size, size)."""
    return torch.randn(batch_size, NUM_COLOURS, image_size, image_size)


def token_cross_entropy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all tokens of the batch."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy: logits (batch, classes, ...), targets (batch, ...)."""
    return F.cross_entropy(logits, targets)
