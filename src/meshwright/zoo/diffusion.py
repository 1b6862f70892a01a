"""DDPM: a U-Net that predicts the noise in an image, given the diffusion step.

    h = h + conv(dropout(silu(norm(conv(silu(norm(h))) + W silu(t)))));   h = h + attention(norm(h)) at low resolutions
    t = perceptron(sin and cos of step · 10000^(-i / (D/2 - 1)))
    loss = mean square of (noise − predicted),   image_t = √ᾱ_t image + √(1 − ᾱ_t) noise

Norms are group norms. The output of every encoder block and halving is also an input of the decoder (skip). Source:
Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models" (2020), section 3.4 and appendix B, and its published
code (hojonathanho/diffusion, models/unet.py), whose last layers of each block start at zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import NUM_COLOURS, Batch, random_images
from meshwright.zoo.checks import check_halvings

NORM_EPSILON = 1e-6  # tf.contrib.layers.group_norm, which the published code calls
NUM_STEPS = 1000  # of diffusion, with β from 1e-4 to 0.02 (section 4)
BETA_RANGE = (1e-4, 0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPMShape:
    """The sizes of a DDPM. Level i has ``multiples[i]`` · ``width`` channels and ``blocks_per_level`` blocks.

    Blocks at the image sizes ``attention_sizes`` have attention. ``num_groups`` is the number of groups of each group
    norm: with one channel per group, a norm would cancel the time embedding of its block.
    """

    source: str
    width: int
    multiples: tuple[int, ...]
    blocks_per_level: int
    attention_sizes: tuple[int, ...]
    num_groups: int = 32
    dropout: float = 0.0
    batch_size: int
    image_size: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.multiples or min(self.blocks_per_level, *self.multiples) < 1:
            raise ModelReferenceError(
                f"A DDPM with multiples {list(self.multiples)} and {self.blocks_per_level} blocks per level was "
                "described; expected at least one level and one block."
            )
        if self.width < 4 or self.num_groups < 1 or self.width % self.num_groups:
            raise ModelReferenceError(
                f"A DDPM of width {self.width} with norms of {self.num_groups} groups was described; expected at least "
                "4 channels and a number of groups that divides them."
            )
        check_halvings("DDPM", self.image_size, len(self.multiples) - 1)

    def build(self) -> DDPM:
        """Return the model with newly initialised weights."""
        return DDPM(self)

    def batch(self) -> Batch:
        """Return a synthetic batch.

        Inputs: noisy images (batch, 3, size, size) and their diffusion steps (batch,). Targets: the noise, of the shape
        of the images.
        """
        images, noise = (random_images(self.batch_size, self.image_size) for _ in range(2))
        steps_B = torch.randint(NUM_STEPS, (self.batch_size,))
        kept_B = (1 - torch.linspace(*BETA_RANGE, NUM_STEPS)).cumprod(0)[steps_B].view(-1, 1, 1, 1)
        return (kept_B.sqrt() * images + (1 - kept_B).sqrt() * noise, steps_B), (noise,)

    @staticmethod
    def loss(predicted: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of the predicted noise."""
        return F.mse_loss(predicted, noise)


class DDPM(nn.Module):
    """Encoder, middle and decoder, each a flat list of blocks, so that a pipeline can be cut between any two blocks."""

    def __init__(self, shape: DDPMShape) -> None:
        super().__init__()
        width, self.width = shape.width, shape.width
        self.time_in, self.time_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, 4 * width)
        self.stem = nn.Conv2d(NUM_COLOURS, width, 3, padding=1)
        channels, size, skips = width, shape.image_size, [width]
        encoder: list[nn.Module] = []
        for level, multiple in enumerate(shape.multiples):
            for _ in range(shape.blocks_per_level):
                encoder.append(ResidualBlock(shape, channels, multiple * width, attend=size in shape.attention_sizes))
                channels = multiple * width
                skips.append(channels)
            if level < len(shape.multiples) - 1:
                encoder.append(Halve(channels))
                skips.append(channels)
                size //= 2
        self.encoder = nn.ModuleList(encoder)
        self.middle = nn.ModuleList(ResidualBlock(shape, channels, channels, attend=attend) for attend in (True, False))
        decoder: list[nn.Module] = []
        for level, multiple in reversed(list(enumerate(shape.multiples))):
            for _ in range(shape.blocks_per_level + 1):
                inputs = channels + skips.pop()
                decoder.append(ResidualBlock(shape, inputs, multiple * width, attend=size in shape.attention_sizes))
                channels = multiple * width
            if level > 0:
                decoder.append(Double(channels))
                size *= 2
        self.decoder = nn.ModuleList(decoder)
        self.norm = group_norm(shape, channels)
        self.head = zeroed(nn.Conv2d(channels, NUM_COLOURS, 3, padding=1))

    def forward(self, images_BCHW: torch.Tensor, steps_B: torch.Tensor) -> torch.Tensor:
        """Noisy images (batch, 3, size, size) and their steps (batch,) → predicted noise (batch, 3, size, size)."""
        time_BE = F.silu(self.time_out(F.silu(self.time_in(sinusoids(steps_B, self.width, images_BCHW.dtype)))))
        x_BCHW = self.stem(images_BCHW)
        skips = [x_BCHW]
        for unit in self.encoder:
            x_BCHW = unit(x_BCHW, time_BE)
            skips.append(x_BCHW)
        for unit in self.middle:
            x_BCHW = unit(x_BCHW, time_BE)
        for unit in self.decoder:
            x_BCHW = unit(x_BCHW if isinstance(unit, Double) else torch.cat((x_BCHW, skips.pop()), dim=1), time_BE)
        return self.head(F.silu(self.norm(x_BCHW)))


class ResidualBlock(nn.Module):
    """A residual block with the time embedding as a second input, followed by attention if ``attend``."""

    def __init__(self, shape: DDPMShape, num_inputs: int, width: int, *, attend: bool) -> None:
        super().__init__()
        self.norm1 = group_norm(shape, num_inputs)
        self.convolution1 = nn.Conv2d(num_inputs, width, 3, padding=1)
        self.time = nn.Linear(4 * shape.width, width)
        self.norm2 = group_norm(shape, width)
        self.dropout = nn.Dropout(shape.dropout)
        self.convolution2 = zeroed(nn.Conv2d(width, width, 3, padding=1))
        self.shortcut = nn.Identity() if num_inputs == width else nn.Conv2d(num_inputs, width, 1)
        self.attention = PixelAttention(shape, width) if attend else nn.Identity()

    def forward(self, x_BCHW: torch.Tensor, time_BE: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, height, width), (batch, 4 · model's width) → (batch, width, height, width)."""
        y_BCHW = self.convolution1(F.silu(self.norm1(x_BCHW))) + self.time(time_BE)[:, :, None, None]
        y_BCHW = self.convolution2(self.dropout(F.silu(self.norm2(y_BCHW))))
        return self.attention(self.shortcut(x_BCHW) + y_BCHW)


class PixelAttention(nn.Module):
    """Self-attention of one head over all pixels, added to its input."""

    def __init__(self, shape: DDPMShape, width: int) -> None:
        super().__init__()
        self.norm = group_norm(shape, width)
        self.query_key_value = nn.Conv2d(width, 3 * width, 1)
        self.projection = zeroed(nn.Conv2d(width, width, 1))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) → (batch, channels, height, width)."""
        query, key, value = (
            part.flatten(2).transpose(1, 2) for part in self.query_key_value(self.norm(x_BCHW)).chunk(3, dim=1)
        )
        mixed_BPC = F.scaled_dot_product_attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)).squeeze(1)
        return x_BCHW + self.projection(mixed_BPC.transpose(1, 2).unflatten(2, x_BCHW.shape[2:]))


class Halve(nn.Module):
    """Halve the image: a 3×3 convolution of stride 2, padded on the right and below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x_BCHW: torch.Tensor, _time_BE: torch.Tensor) -> torch.Tensor:
        """(batch, channels, 2h, 2w) → (batch, channels, h, w)."""
        return self.convolution(F.pad(x_BCHW, (0, 1, 0, 1)))


class Double(nn.Module):
    """Double the image: repeat each pixel in a 2×2 patch, then apply a 3×3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x_BCHW: torch.Tensor, _time_BE: torch.Tensor) -> torch.Tensor:
        """(batch, channels, h, w) → (batch, channels, 2h, 2w)."""
        return self.convolution(F.interpolate(x_BCHW, scale_factor=2.0, mode="nearest"))


def sinusoids(steps_B: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the time embedding (batch, width): sines, then cosines of step · 10000^(-i / (width/2 - 1))."""
    half = width // 2
    rates_K = torch.exp(torch.arange(half, device=steps_B.device) * (-math.log(10000.0) / (half - 1)))
    angles_BK = steps_B.unsqueeze(1) * rates_K
    return torch.cat((angles_BK.sin(), angles_BK.cos()), dim=1).to(dtype)


def group_norm(shape: DDPMShape, width: int) -> nn.GroupNorm:
    """Return a group norm for ``width`` channels, with the shape's number of groups."""
    return nn.GroupNorm(shape.num_groups, width, eps=NORM_EPSILON)


def zeroed(layer: nn.Conv2d) -> nn.Conv2d:
    """Set the weights of a layer to zero, in place, and return it."""
    nn.init.zeros_(layer.weight)
    return layer
