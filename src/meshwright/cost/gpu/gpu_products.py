"""Fitted figures of a GPU: corrections of the product predictor (`cost.kernels`), and rates of memory-bound kernels.

alignment     tensor cores of 2-byte types load 16 bytes at a time. If a row of a factor or of the result is not a
              multiple of 16 bytes, cuBLAS uses older kernels. Their rate per multiprocessor and cycle is proportional
              to the width of their loads, and depends on whether the factor or the result is not aligned
float32       products without tensor cores, which the predictor was not fitted on: one fitted factor for single
              products, another for batched products
convolutions  estimated as implicit GEMMs, times a factor by the number of positions (pixels) of the output, for 1x1
              (point) and larger (window) kernels. cuDNN computes with channels last, and reorders tensors with channels
              first, except for 1x1 kernels if the number of positions is a multiple of 8
others        `GpuModel`: seconds of memory-bound kernels by their sort and bytes per element

Fitted to products, their two gradients, convolutions and other kernels measured on one H100 (`scripts/gpu_fit.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

from meshwright.cost.costs import Basis, Interval
from meshwright.cost.kernels.demand import is_tiled
from meshwright.spec import DeviceKind, decode_document
from meshwright.spec.parsing import read_data
from meshwright.spec.units import ARITHMETIC_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable


# Bytes of one load of tensor cores.
_LOAD_BYTES = 16
_ALIGNED_PLACES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRates:
    """Fitted corrections of predicted matrix products and convolutions.

    ``odd_input``, ``odd_output``: FLOPs per multiprocessor and cycle, per element of alignment, if the factors or the
    result are not aligned. ``float32``, ``float32_many``: measured / predicted seconds of a single product and of a
    batched one. ``places``: numbers of output positions (pixels) of the fitted convolutions, ascending. ``point``,
    ``window``: measured / predicted seconds at these numbers for 1x1 and larger kernels, by bytes of an element ("2",
    "4").
    """

    odd_input: float
    odd_output: float
    float32: float
    float32_many: float
    places: tuple[int, ...]
    point: dict[str, tuple[float, ...]]
    window: dict[str, tuple[float, ...]]

    def convolution_factor(self, places: float, dtype: str, *, is_point: bool) -> float:
        """Return measured / predicted seconds of a convolution whose output has ``places`` positions (pixels).

        ``is_point``: whether its kernel is 1x1.
        """
        factors = (self.point if is_point else self.window)["2" if ARITHMETIC_BYTES.get(dtype) == 2 else "4"]
        if is_point and places % _ALIGNED_PLACES == 0:
            places = max(places, self.places[2])
        return between(math.log(max(places, 1.0)), [math.log(place) for place in self.places], factors)

    def float32_factor(self, count: float) -> float:
        """Return measured / predicted seconds of a batch of ``count`` float32 products, if none were in the fit."""
        return self.float32_many if count > 1 else self.float32

    def least_seconds(
        self, sizes: tuple[float, float, float, float], dtype: str, kind: DeviceKind, *, backward: bool
    ) -> float:
        """Return a lower bound, in seconds, for ``count`` unaligned products of (m, k) by (k, n); 0 if aligned.

        ``sizes`` is (m, n, k, count), that of the forward. In the forward, rows of the factors have k elements and rows
        of the result n; in the ``backward`` it is the reverse.
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
    """Return the largest power of two, at most 8, that divides the number of 2-byte elements of a row."""
    return math.gcd(round(row), _LOAD_BYTES // 2)


def between(at: float, places: list[float], values: tuple[float, ...]) -> float:
    """Interpolate linearly at ``at``, between ``values`` at ascending ``places``; beyond an end, return its value."""
    if at <= places[0]:
        return values[0]
    for index in range(1, len(places)):
        if at <= places[index]:
            share = (at - places[index - 1]) / (places[index] - places[index - 1])
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


# The steepness with which reads leave the cache, as for products (`cost.kernels.law`), and the share of it that data
# may fill: an output uses a part (own rows: additions of 25 and 38 MB are fast, those of 50 MB as slow as from memory).
_SLOPE, _FITS = 6, 0.8
# Fitted widths of an element; other widths use the nearest.
_WIDTHS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One memory-bound kernel: its ``sort``, such as "pointwise" or "softmax", and its work.

    ``width``: bytes of an element. ``row``: elements of a row. ``cold``: bytes read or written, without ``hot``: bytes
    read that the previous kernel has just written. ``turns``: sequential steps of one multiprocessor.
    """

    sort: str
    width: int = 4
    row: int = 1
    cold: float = 0.0
    hot: float = 0.0
    turns: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The fitted speed of one sort of kernel for one element width.

    ``fixed_s``: seconds of every kernel. ``shares``: shares of the memory bandwidth (0..1) for rows of the lengths
    ``rows``, ascending. ``cached``: how many times as fast data in the L2 cache is read. ``turn_s``: seconds of a
    sequential step at the clock of the fit.
    """

    fixed_s: float
    rows: tuple[int, ...]
    shares: tuple[float, ...]
    cached: float
    turn_s: float

    def share(self, row: int) -> float:
        """Return the share (0..1) of the memory bandwidth for rows of ``row`` elements."""
        if len(self.rows) == 1:
            return self.shares[0]
        if row < self.rows[0]:
            falling = math.log(self.shares[1] / self.shares[0]) / math.log(self.rows[1] / self.rows[0])
            return self.shares[0] * math.pow(max(row, 1) / self.rows[0], min(max(falling, 0.0), 1.0))
        for (short, low), (long, high) in zip(
            zip(self.rows, self.shares, strict=True), zip(self.rows[1:], self.shares[1:], strict=True), strict=False
        ):
            if row <= long:
                return low + (high - low) * math.log(row / short) / math.log(long / short)
        return self.shares[-1]


# Seconds of memory-bound kernels, by their sort: the achieved share of a GPU's bandwidth, and other limits.
#
#     t = fixed + ((bytes / (share · bandwidth))⁴ + (turns · turn)⁴)^¼
#     bytes = cold + hot · (1 - held) + hot · held / cached        held = 1 / (1 + (moved / (fits · cache))⁴)
#
#     share   of the datasheet's bandwidth, by the length of a row: linear in its logarithm between fitted lengths;
#             below the shortest it continues to fall as between the two shortest, at most in proportion to the length,
#             since each row has a cost
#     hot     bytes that the previous kernel has just written: what fits into the L2 cache is read ``cached`` times as
#             fast
#     turns   sequential steps of one multiprocessor: elements of a channel, cells of a window; their seconds are cycles
#             and scale with the clock
#
# The figures of ``models/gpu.json`` are fitted to kernels measured on one H100; on other devices their shares of the
# datasheet stay.
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """The fitted speeds of kernels on one GPU, which also serve as estimates for other GPUs.

    ``device``, ``clock_hz``: the GPU of the fit and its clock. ``rates``: by sort of kernel and bytes of an element,
    such as "pointwise/2". ``optimizer_shares``: shares of the memory bandwidth (0..1) in optimizer steps, by bytes of a
    state ("2", "4"). ``regressed``: interval of held-out kernels on the GPU of the fit; ``transferred``: assumed
    interval on other devices.
    """

    device: str
    clock_hz: float
    rates: dict[str, Rate]
    products: ProductRates
    optimizer_shares: dict[str, float]
    regressed: Interval
    transferred: Interval

    SCHEMA_VERSION: ClassVar[int] = 1

    def rate(self, sort: str, width: int) -> Rate:
        """Return the rate of a sort of kernel for elements of ``width`` bytes; the nearest fitted width is used."""
        return self.rates[f"{sort}/{_WIDTHS[width > _WIDTHS[0]]}"]

    def optimizer_share(self, width: int) -> float:
        """Return the share (0..1) of the memory bandwidth in optimizer steps with states of ``width`` bytes."""
        return self.optimizer_shares["2" if width == 2 else "4"]

    def basis_on(self, kind: DeviceKind) -> tuple[Basis, Interval]:
        """Return the basis and the interval of costs on a device kind: "regressed" on the GPU of the fit."""
        if kind.usual_name == self.device:
            return "regressed", self.regressed
        return "transferred", self.transferred

    def seconds(self, launches: Iterable[Launch], kind: DeviceKind) -> float:
        """Return the seconds of kernels that run one after the other on a device kind with known cache and clock."""
        rates = ((self.rate(launch.sort, launch.width), launch) for launch in launches)
        return sum(launch_seconds(rate, launch, kind, self.clock_hz) for rate, launch in rates)


def is_modelled(kind: DeviceKind) -> bool:
    """Return whether `GpuModel` applies to a device kind: a GPU with a float16 rate and known multiprocessors."""
    return is_tiled(kind) and "float16" in kind.peak_flops_per_s


def launch_seconds(rate: Rate, launch: Launch, kind: DeviceKind, clock_hz: float) -> float:
    """Return the seconds of one kernel on a device kind, by a rate that was fitted at the clock ``clock_hz`` (Hz)."""
    moved = launch.cold + launch.hot
    held = 1 / (1 + (moved / (_FITS * kind.cache_bytes)) ** _SLOPE)
    read = launch.cold + launch.hot * (1 - held + held / rate.cached)
    memory = read / (rate.share(launch.row) * kind.memory_bandwidth_bytes_per_s)
    turns = launch.turns * rate.turn_s * clock_hz / kind.clock_hz
    return rate.fixed_s + math.hypot(memory**2, turns**2) ** 0.5 if turns else rate.fixed_s + memory


@cache
def shipped_gpu() -> GpuModel:
    """Load the shipped model of a GPU's kernels."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "gpu.json") as path:
        return decode_document(GpuModel, read_data(path), path.name)
