"""ResNet: stages of residual blocks over images, with batch norm.

    x = relu(f(x) + s(x))     f: convolutions and norms; s: the identity, or a 1×1 convolution where the size changes

Source: He et al., "Deep Residual Learning for Image Recognition" (2015), table 1; in bottlenecks the 3×3 convolution
has the stride (torchvision's "v1.5"), initial weights as in its section 3.4 (He et al., "Delving Deep", 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import NUM_COLOURS, Batch, cross_entropy, random_images

BOTTLENECK_EXPANSION = 4  # table 1: the outer width of a bottleneck is four times its inner width


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape:
    """The sizes of a ResNet. From stage to stage, ``width`` doubles and the image is halved.

    ``stem`` "imagenet" is a 7×7 convolution and a pool that reduce the image to a quarter of its side; "cifar" is a 3×3
    convolution that keeps the size (He et al., section 4.2).
    """

    source: str
    block: Literal["basic", "bottleneck"]
    blocks_per_stage: tuple[int, ...]
    width: int = 64
    stem: Literal["imagenet", "cifar"] = "imagenet"
    num_classes: int
    batch_size: int
    image_size: int

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        shrink = (4 if self.stem == "imagenet" else 1) * 2 ** (len(self.blocks_per_stage) - 1)
        if not self.blocks_per_stage or min(self.blocks_per_stage) < 1:
            raise ModelReferenceError(
                f"A ResNet with {list(self.blocks_per_stage)} blocks per stage was described; "
                "expected at least one stage and one block in each."
            )
        if self.image_size < 2 * shrink:
            raise ModelReferenceError(
                f"Images of {self.image_size} pixels were asked for, but this ResNet shrinks them {shrink}-fold and "
                f"its batch norms need more than one pixel; choose at least {2 * shrink} pixels."
            )

    def build(self) -> ResNet:
        """Return the model with newly initialised weights."""
        return ResNet(self)

    def batch(self) -> Batch:
        """Return a synthetic batch. Inputs: images (batch, 3, size, size); targets: classes (batch,)."""
        images = random_images(self.batch_size, self.image_size)
        return (images,), (torch.randint(self.num_classes, (self.batch_size,)),)

    loss = staticmethod(cross_entropy)


class ResNet(nn.Module):
    """The stem, all blocks in one sequence, the mean over the pixels, and a linear head."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.stem = Stem(shape)
        block = BasicBlock if shape.block == "basic" else BottleneckBlock
        blocks: list[nn.Module] = []
        num_channels = shape.width
        for stage, num_blocks in enumerate(shape.blocks_per_stage):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(num_channels, shape.width * 2**stage, stride))
                num_channels = shape.width * 2**stage * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(num_channels, shape.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, size, size) → logits (batch, classes)."""
        features_BCHW = self.blocks(self.stem(images_BCHW))
        return self.head(features_BCHW.mean((2, 3)))


class Stem(nn.Module):
    """The first convolution, with norm, ReLU and (for ImageNet) a pool."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        if shape.stem == "imagenet":
            self.convolution = nn.Conv2d(NUM_COLOURS, shape.width, 7, stride=2, padding=3, bias=False)
            self.pool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.convolution = nn.Conv2d(NUM_COLOURS, shape.width, 3, padding=1, bias=False)
            self.pool = nn.Identity()
        self.norm = nn.BatchNorm2d(shape.width)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, size, size) → features (batch, channels, size / 4 or size, ...)."""
        return self.pool(F.relu(self.norm(self.convolution(images_BCHW))))


class BasicBlock(nn.Module):
    """A residual block of two 3×3 convolutions."""

    expansion = 1

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(num_inputs, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(num_inputs, width, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, height, width) → (batch, width, height / stride, width / stride)."""
        y_BCHW = F.relu(self.norm1(self.convolution1(x_BCHW)))
        return F.relu(self.norm2(self.convolution2(y_BCHW)) + self.shortcut(x_BCHW))


class BottleneckBlock(nn.Module):
    """A residual block of a 1×1 convolution that narrows, a 3×3 convolution, and a 1×1 convolution that widens."""

    expansion = BOTTLENECK_EXPANSION

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = width * self.expansion
        self.convolution1 = nn.Conv2d(num_inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.convolution3 = nn.Conv2d(width, num_outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(num_outputs)
        self.shortcut = shortcut(num_inputs, num_outputs, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, height, width) → (batch, 4 × width, height / stride, width / stride)."""
        y_BCHW = F.relu(self.norm1(self.convolution1(x_BCHW)))
        y_BCHW = F.relu(self.norm2(self.convolution2(y_BCHW)))
        return F.relu(self.norm3(self.convolution3(y_BCHW)) + self.shortcut(x_BCHW))


def shortcut(num_inputs: int, num_outputs: int, stride: int) -> nn.Module:
    """Return the identity if input and output have the same size, else a normed 1×1 convolution (paper's option B)."""
    if stride == 1 and num_inputs == num_outputs:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 1, stride=stride, bias=False),
        nn.BatchNorm2d(num_outputs),
    )
