"""Matrix products of odd sizes in compiled units, which inductor pads for tensor cores if padding is faster.

If rows or columns of a factor are not multiples of 16 bytes, inductor copies the factor to a larger matrix that ends
with zeros, and takes the part of the product without zeros (torch/_inductor/fx_passes/pad_mm.py; `shape_padding` is on
by default). Inductor measures both variants and pads if that is 1.1 times as fast. Here both variants are predicted and
compared with the same factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.cost.gpu.gpu_products import GpuModel, Launch, alignment
from meshwright.cost.roofline import RooflineSeconds
from meshwright.cost.work.op_calls import read_call
from meshwright.cost.work.work_count import product_sizes
from meshwright.spec.units import ARITHMETIC_BYTES

if TYPE_CHECKING:
    from meshwright.cost.costs import OpCost
    from meshwright.spec import DeviceKind

# pad_mm.py, should_pad: the factor by which the product of odd sizes must take longer.
_WORTH = 1.1
_ALIGNED = 8
_BYTES = 2


def without_odd_sizes(model: GpuModel) -> GpuModel:
    """Return a copy of the model in which products of odd (unaligned) sizes are as fast as aligned ones."""
    return replace(model, products=replace(model.products, odd_input=float("inf"), odd_output=float("inf")))


def estimate_padded(odd: OpCost, aligned: OpCost, key: str, dtype: str, model: GpuModel, kind: DeviceKind) -> OpCost:
    """Return the cost of a product of odd sizes, with each pass unpadded or padded, as inductor chooses.

    ``odd``: cost without padding. ``aligned``: cost if all sizes were aligned. Aligned products keep the cost ``odd``.
    """
    call = read_call(key)
    if call is None or ARITHMETIC_BYTES.get(dtype) != _BYTES or "conv" in call.operator:
        return odd
    m, n, k, count = product_sizes(call)
    if all(alignment(size) == _ALIGNED for size in (m, n, k)):
        return odd

    def copies(*factors: tuple[float, float]) -> float:
        """Return the seconds to pad the factors of one product that have an odd size."""
        padded = [rows * row for rows, row in factors if min(alignment(rows), alignment(row)) < _ALIGNED]
        moved = [count * elements * _BYTES for elements in padded]
        return model.seconds([Launch(sort="pointwise", width=_BYTES, cold=2 * each) for each in moved], kind)

    forward = aligned.seconds.forward_s + copies((m, k), (k, n))
    backward = aligned.seconds.backward_s + copies((m, n), (n, k)) + copies((m, n), (m, k))
    factors = [
        padded / own if own > _WORTH * padded else 1.0
        for own, padded in ((odd.seconds.forward_s, forward), (odd.seconds.backward_s, backward))
    ]

    def scaled(seconds: RooflineSeconds) -> RooflineSeconds:
        return seconds.scaled(factors[0], factors[1], 1.0)

    return replace(odd, seconds=scaled(odd.seconds), low=scaled(odd.low), high=scaled(odd.high))
