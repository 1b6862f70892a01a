"""VGG: groups of 3×3 convolutions, each followed by a pool, and a perceptron of three layers.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks" (2014), table 1; the pool to a fixed grid before the
perceptron, which lets images have any size, is torchvision's. Initial weights: He et al., "Delving Deep" (2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import NUM_COLOURS, Batch, cross_entropy, random_images


@dataclass(frozen=True, slots=True, kw_only=True)
class VGGShape:
    """The sizes of a VGG: ``widths`` are the channels of the convolutions in each group.

    The perceptron has ``hidden_width``; its input is the image pooled to ``grid`` × ``grid`` pixels.
    """

    source: str
    widths: tuple[tuple[int, ...], ...]
    hidden_width: int
    grid: int = 7
    dropout: float = 0.5
    num_classes: int
    batch_size: int
    image_size: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.widths or not all(self.widths) or min(min(group) for group in self.widths) < 1:
            raise ModelReferenceError(
                f"A VGG with widths {[list(group) for group in self.widths]} was described; "
                "expected at least one group and at least one positive width in each."
            )
        if self.image_size < 2 ** len(self.widths):
            raise ModelReferenceError(
                f"Images of {self.image_size} pixels were asked for, but this VGG halves them {len(self.widths)} "
                f"times; choose at least {2 ** len(self.widths)} pixels."
            )

    def build(self) -> VGG:
        """Return the model with newly initialised weights."""
        return VGG(self)

    def batch(self) -> Batch:
        """Return a synthetic batch. Inputs: images (batch, 3, size, size); targets: classes (batch,)."""
        images = random_images(self.batch_size, self.image_size)
        return (images,), (torch.randint(self.num_classes, (self.batch_size,)),)

    loss = staticmethod(cross_entropy)


class VGG(nn.Module):
    """All convolutions in one sequence, a pool to the grid, and the perceptron."""

    def __init__(self, shape: VGGShape) -> None:
        super().__init__()
        features: list[nn.Module] = []
        num_channels = NUM_COLOURS
        for group in shape.widths:
            for width in group:
                features += [nn.Conv2d(num_channels, width, 3, padding=1), nn.ReLU()]
                num_channels = width
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.pool = nn.AdaptiveAvgPool2d(shape.grid)
        self.classifier = nn.Sequential(
            nn.Linear(num_channels * shape.grid**2, shape.hidden_width),
            nn.ReLU(),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.hidden_width, shape.hidden_width),
            nn.ReLU(),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.hidden_width, shape.num_classes),
        )
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.get_parameter("bias"))

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, size, size) → logits (batch, classes)."""
        return self.classifier(self.pool(self.features(images_BCHW)).flatten(1))
