"""What one device runs in a training step of a residual network, whose batch is split over the devices.

A convolution of B images with p x p places, c channels from i through w x w is the product (B·p·p, c, i·w·w); of its
backward two, none for the gradient of the images. A batch norm with what follows it (ReLU, the block's sum) reads its
input twice and writes once; backward it reads the gradient and its input twice and writes once. Where the batch is
split, its sums are those of all devices (JAX, pjit: the program is that of one device).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cost.steps.counted import CountedOp, gradient_ops
from meshwright.cost.transformer import SINGLE

if TYPE_CHECKING:
    from meshwright.cost.residual import ResidualShape
    from meshwright.cost.steps.counted import Part
    from meshwright.cost.transformer import TrainingSetup

_NORM_PASSES, _NORM_BACKWARD_PASSES, _SUMS = 3, 5, 2


def residual_ops(shape: ResidualShape, setup: TrainingSetup) -> tuple[CountedOp, ...]:
    """All ops of the network for one microbatch in single precision, forward and backward."""
    images = setup.microbatch_size
    forward: list[CountedOp] = []
    sums: list[CountedOp] = []
    for each in shape.convolutions:
        places = images * each.outputs**2
        sizes = (("m", places), ("n", each.channels), ("k", each.inputs * each.window**2))
        forward.append(CountedOp(name="convolution", op="matmul", sizes=sizes, weighted=True, first=not forward))
        forward.append(_norm(places * each.channels))
        if setup.dp > 1:
            parts: tuple[Part, ...] = ("forward", "input_gradient")
            sums += [_sum_up(SINGLE * _SUMS * each.channels, part) for part in parts]
    head = (("m", images), ("n", shape.classes), ("k", shape.convolutions[-1].channels))
    forward.append(CountedOp(name="head", op="matmul", sizes=head, weighted=True))
    return (*forward, *(gradient for op in forward for gradient in gradient_ops(op)), *sums)


def _norm(elements: int) -> CountedOp:
    moved, back = (SINGLE * passes * elements for passes in (_NORM_PASSES, _NORM_BACKWARD_PASSES))
    return CountedOp(name="norm", op="memory", sizes=(("bytes", moved),), gradient_bytes=back)


def _sum_up(num_bytes: int, part: Part) -> CountedOp:
    return CountedOp(name="sums", op="all_reduce", sizes=(("bytes", num_bytes),), part=part, group="data")
