"""The shape of a bottleneck residual network with wide inner convolutions, where there is no captured graph.

    stem     7 x 7 windows, every second place; largest of 3 x 3, every second place
    block    1 x 1 into c, 3 x 3 into c·w, 1 x 1 into 4·c, a batch norm after each; where sizes change, a 1 x 1 beside
    stage i  c = channels · 2^i; from the second on its first block takes every second place
    head     mean over places, a product with 4·c x classes

(He et al., CVPR 2016, section 4.1; Zagoruyko and Komodakis, BMVC 2016; google/flax, examples/imagenet/models.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

# Places of the image to a place of the first stage's.
_STEM, _STEM_WINDOW, _COLOURS = 4, 7, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """``outputs`` places on a side, of ``channels`` from ``inputs`` channels, through a square window."""

    outputs: int
    channels: int
    inputs: int
    window: int

    @property
    def weights(self) -> int:
        """Parameters of it."""
        return self.channels * self.inputs * self.window**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualShape:
    """Sizes of the model: blocks of each stage, channels of the first, how much wider a block's inner convolution is.

    ``image``: pixels on a side.
    """

    blocks: tuple[int, ...]
    channels: int
    width: int
    image: int
    classes: int

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """All of them, in order."""
        side, known = self.image // _STEM, self.channels
        found = [Convolution(outputs=2 * side, channels=known, inputs=_COLOURS, window=_STEM_WINDOW)]
        for stage, count in enumerate(self.blocks):
            narrow = self.channels * 2**stage
            for block in range(count):
                after = side // 2 if stage and not block else side
                wide = 4 * narrow
                found += [
                    Convolution(outputs=side, channels=narrow, inputs=known, window=1),
                    Convolution(outputs=after, channels=narrow * self.width, inputs=narrow, window=3),
                    Convolution(outputs=after, channels=wide, inputs=narrow * self.width, window=1),
                ]
                if (side, known) != (after, wide):
                    found.append(Convolution(outputs=after, channels=wide, inputs=known, window=1))
                side, known = after, wide
        return tuple(found)

    @property
    def num_parameters(self) -> int:
        """Weights, two numbers of each normalised channel, and the head with its biases."""
        normed = sum(each.weights + 2 * each.channels for each in self.convolutions)
        return normed + (self.convolutions[-1].channels + 1) * self.classes
