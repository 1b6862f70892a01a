"""Corrections of the product predictor (`cost.kernels`): unaligned sizes, float32, convolutions.

alignment     tensor cores of 2-byte types load 16 bytes at a time. If a row of a factor or of the result is not a
              multiple of that, cuBLAS uses older kernels, whose rate per multiprocessor and cycle is limited by their
              loads: twice as wide loads, twice the rate. The rate depends on which of the two is odd
float32       without tensor cores, not among the rows of the predictor: one factor, another for many products at once
convolutions  estimated as implicit GEMMs, times a factor by the number of places of an image, for point and for window
              kernels: cuDNN computes with channels last, and reorders tensors with channels first except for point
              kernels with aligned rows of places (multiples of 8)

Fitted to products, their two gradients and convolutions measured on one H100 (`cost.gpu.fit_products`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.spec.units import ARITHMETIC_BYTES

if TYPE_CHECKING:
    from meshwright.spec import DeviceKind

# Bytes of one load of tensor cores.
_LOAD_BYTES = 16
_ALIGNED_PLACES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRates:
    """Fitted corrections of predicted products.

    ``odd_input``, ``odd_output``: FLOPs per multiprocessor and cycle, per element of alignment. ``float32``,
    ``float32_many``: measured over predicted seconds. ``places``: the numbers of places of an image, ascending, at
    which the factors of convolutions ``point`` and ``window`` were fitted, by bytes of an element ("2", "4").
    """

    odd_input: float
    odd_output: float
    float32: float
    float32_many: float
    places: tuple[int, ...]
    point: dict[str, tuple[float, ...]]
    window: dict[str, tuple[float, ...]]

    def convolution_factor(self, places: float, dtype: str, *, is_point: bool) -> float:
        """Return measured over predicted seconds of a convolution whose output has this number of places."""
        factors = (self.point if is_point else self.window)["2" if ARITHMETIC_BYTES.get(dtype) == 2 else "4"]
        if is_point and places % _ALIGNED_PLACES == 0:
            places = max(places, self.places[2])
        return between(math.log(max(places, 1.0)), [math.log(place) for place in self.places], factors)

    def float32_factor(self, count: float) -> float:
        """Return measured over predicted seconds of ``count`` products in float32, if the rows contained none."""
        return self.float32_many if count > 1 else self.float32

    def least_seconds(
        self, sizes: tuple[float, float, float, float], dtype: str, kind: DeviceKind, *, backward: bool
    ) -> float:
        """Return the least seconds of ``count`` products of (m, k) by (k, n); ``sizes`` is (m, n, k, count).

        In a forward, rows of the result have n elements, those of the factors k. For the gradients of a layer it is the
        reverse: ``backward`` with the sizes of the forward.
        """
        if ARITHMETIC_BYTES.get(dtype) != 2:
            return 0.0
        m, n, k, count = sizes
        read, written = (n, k) if backward else (k, n)
        flops, cycles = 2.0 * m * n * k * count, kind.num_multiprocessors * kind.clock_hz
        least = [
            flops / (rate * aligned * cycles)
            for rate, aligned in ((self.odd_input, alignment(read)), (self.odd_output, alignment(written)))
            if aligned < _LOAD_BYTES // 2
        ]
        return max(least, default=0.0)


def alignment(row: float) -> int:
    """Return the largest power of two, up to a load, that divides a row's number of 2-byte elements."""
    return math.gcd(round(row), _LOAD_BYTES // 2)


def between(at: float, places: list[float], values: tuple[float, ...]) -> float:
    """Interpolate linearly between ascending places; beyond them, return the nearest value."""
    if at <= places[0]:
        return values[0]
    for index in range(1, len(places)):
        if at <= places[index]:
            share = (at - places[index - 1]) / (places[index] - places[index - 1])
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]
