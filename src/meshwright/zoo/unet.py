"""U-Net: an encoder that halves the image, a decoder that doubles it, and a skip connection on every level.

    e_k = convolve(pool(e_{k-1}));   d_k = convolve(concat(e_k, upsample(d_{k+1})));   logits = W d_0

The skip connection of level k bypasses all levels below, so pipeline stages of this model send to more stages than the
next one. Source: Ronneberger, Fischer and Brox, "U-Net" (2015), figure 1 and section 3 (initial weights);
convolutions are padded here, so that skips need no cropping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import NUM_COLOURS, Batch, cross_entropy, random_images
from meshwright.zoo.checks import check_halvings


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetShape:
    """The sizes of a U-Net: ``num_levels`` halvings; ``width`` channels at full size, doubled at each halving."""

    source: str
    num_levels: int
    width: int
    num_classes: int
    batch_size: int
    image_size: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if min(self.num_levels, self.width) < 1:
            raise ModelReferenceError(
                f"A U-Net of {self.num_levels} levels and width {self.width} was described; expected both to be at "
                "least 1."
            )
        check_halvings("U-Net", self.image_size, self.num_levels)

    def build(self) -> UNet:
        """Return the model with newly initialised weights."""
        return UNet(self)

    def batch(self) -> Batch:
        """Return a synthetic batch.

        Inputs: images (batch, 3, size, size). Targets: the class of each pixel (batch, size, size).
        """
        images = random_images(self.batch_size, self.image_size)
        return (images,), (torch.randint(self.num_classes, (self.batch_size, self.image_size, self.image_size)),)

    loss = staticmethod(cross_entropy)


class UNet(nn.Module):
    """Encoder, bottom, decoder with skip connections, and a 1×1 convolution as head."""

    def __init__(self, shape: UNetShape) -> None:
        super().__init__()
        widths = [shape.width * 2**level for level in range(shape.num_levels + 1)]
        self.encoder = nn.ModuleList(
            DoubleConvolution(num_inputs, width)
            for num_inputs, width in zip([NUM_COLOURS, *widths], widths[:-1], strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = DoubleConvolution(widths[-2], widths[-1])
        self.decoder = nn.ModuleList(UpBlock(width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(shape.width, shape.num_classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.get_parameter("bias"))

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, size, size) → logits of every pixel (batch, classes, size, size)."""
        x_BCHW, skips = images_BCHW, []
        for block in self.encoder:
            skips.append(block(x_BCHW))
            x_BCHW = self.pool(skips[-1])
        x_BCHW = self.bottom(x_BCHW)
        for block, skip_BCHW in zip(self.decoder, reversed(skips), strict=True):
            x_BCHW = block(x_BCHW, skip_BCHW)
        return self.head(x_BCHW)


class DoubleConvolution(nn.Module):
    """Two 3×3 convolutions, each followed by ReLU."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(num_inputs, width, 3, padding=1)
        self.convolution2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, height, width) → (batch, outputs, height, width)."""
        return self.convolution2(self.convolution1(x_BCHW).relu()).relu()


class UpBlock(nn.Module):
    """Double the image, halve the channels, concatenate the skip of the same level, and apply two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.convolutions = DoubleConvolution(2 * width, width)

    def forward(self, x_BCHW: torch.Tensor, skip_BCHW: torch.Tensor) -> torch.Tensor:
        """(batch, 2w, size, size) and (batch, w, 2 size, 2 size) → (batch, w, 2 size, 2 size)."""
        return self.convolutions(torch.cat((skip_BCHW, self.up(x_BCHW)), dim=1))
