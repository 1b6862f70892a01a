"""The demand of a GPU kernel, in seconds at datasheet rates, for every way to cut it into tiles.

A product (m, k) by (k, n) in tiles of (a, b) over s splits of k, on S multiprocessors of P/S FLOP/s each:

    waves   w = ⌈ ⌈m/a⌉ · ⌈n/b⌉ · s / S ⌉                idle places of the last wave are tail quantisation
    work    w · 2·a·b·(k/s) / (P/S)                      arithmetic of whole tiles: tile quantisation
    pull    w · (a + b)·(k/s)·width / (B/S)              loads of a block, at its share of the memory's bandwidth
    steps   w · (k/s) / 64                               turns of the inner loop, each with its latency
    area    w · a·b                                      elements that the blocks of one multiprocessor write
    fill    ⌈m/a⌉ · ⌈n/b⌉ · s / (w·S)                    share of the waves' places that blocks fill
    merge   s > 1: 2·4·m·n·s bytes                       partial sums written and read again

A batch of products takes ``count`` times the blocks and bytes. Attention with d elements per head is the same with
queries as rows, keys as the inner dimension (unmasked ones, on average) and 4·d FLOPs per pair; decoding packs the
query heads of one key head into the rows.

Sources: NVIDIA, Matrix Multiplication Background User's Guide; Dao, FlashAttention-2 (2023), and Flash-Decoding (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.compiled import compiled
from meshwright.cost.kernels.checks import split_dtype
from meshwright.cost.kernels.tiles import dispatch_of, packs_heads, tiles_of
from meshwright.cost.roofline import peak_flops
from meshwright.spec.units import ARITHMETIC_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.cost.prediction import Floats
    from meshwright.spec import DeviceKind

WAYS = ("work", "loads", "pull", "waves", "steps", "area", "doublings", "merge", "fill")
# The fewest bytes of a written element: results of float8 products are bfloat16 (vLLM, torch._scaled_mm).
_OUTPUT_BYTES = 2
# The number of weights that the benchmark behind the shipped rows cycles through, so that none stays in the cache
# (collect_gemm.py of ai-dynamo/aiconfigurator); activations and results are the same each time, like those that a step
# has just made.
_WEIGHT_COPIES = 6
# Elements of the inner dimension per turn of a kernel's loop (CUTLASS: 32 to 128).
_STEP = 64
# Rows of a block of queries, and numbers of splits of one head's keys (FlashAttention 2 and 3).
_QUERY_ROWS = (64, 128)
_KEY_SPLITS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """The demand of n queries with c ways to cut each: ``ways`` (c, quantities, n), in the order of WAYS; others (n,).

    In seconds unless stated otherwise. ``loads``: elements loaded per pair of FLOPs in a tile, 1/a + 1/b;
    ``doublings``: log₂ splits. ``extra``: additional passes (quantisation). ``cached``: bytes that pass between two
    uses of the same data, as a share of the cache; ``units``: multiprocessors.
    """

    ways: Floats
    flops: Floats
    memory: Floats
    cached: Floats
    extra: Floats
    bandwidth: float
    units: int
    clock_hz: float

    def each(self, quantity: str) -> Floats:
        """Return a quantity of WAYS by way and query, shape (c, n)."""
        return self.ways[:, WAYS.index(quantity)]


def demand_of(op: str, sizes: Mapping[str, Floats], dtype: str, kernel: str, device: DeviceKind) -> Demand:
    """Return the demand of queries of one op, dtype and kernel family.

    The device must state its multiprocessors and cache.
    """
    if op == "matmul":
        return _product(sizes, dtype, kernel, device)
    return _attention(sizes, dtype, kernel, device, decode=op == "attention_decode")


def seen_keys(keys: Floats, window: Floats) -> Floats:
    """Return the most keys that a query sees; a window of 0 means no window."""
    return np.where(window > 0, np.minimum(window, keys), keys)


def mean_keys(queries: Floats, keys: Floats, window: Floats) -> Floats:
    """Return the mean number of keys of a query under a causal mask; the last query is at the last key."""
    seen = seen_keys(keys, window)
    # The number of queries that come too early to see their whole window.
    early = np.clip(seen - np.maximum(keys - queries, 0.0), 0.0, queries)
    return seen - early * np.maximum(early - 1, 0.0) / (2 * queries)


def _product(sizes: Mapping[str, Floats], dtype: str, kernel: str, device: DeviceKind) -> Demand:
    # Copies, because numba compiles separately for read-only arrays.
    m, n, k = (np.array(sizes[name]) for name in ("m", "n", "k"))
    count = np.array(sizes.get("count", np.ones_like(m)))
    name = split_dtype(dtype)[0]
    width, peak = ARITHMETIC_BYTES[name], peak_flops(device, name)
    bandwidth, units = device.memory_bandwidth_bytes_per_s, float(device.num_multiprocessors)
    tiles = list(tiles_of(dispatch_of(kernel, device.compute_capability), m, n, k))
    ways = np.empty((len(tiles), len(WAYS), len(m)))
    for way, (rows, columns, splits) in enumerate(tiles):
        # For tiles, which are powers of two, the inverse is exact.
        a, b = np.full(m.shape, np.divide(1.0, rows)), np.full(m.shape, np.divide(1.0, columns))
        _cut(m, n, k, count, a, b, float(splits), units, units / peak, width * units / bandwidth, ways[way])
    num_bytes = count * (width * (m * k + k * n) + max(width, _OUTPUT_BYTES) * m * n)
    # Between two runs of one product of the benchmark, five others with their own weights pass through the cache.
    passing = num_bytes + (_WEIGHT_COPIES - 1) * width * count * k * n
    # Activations of a float8 product arrive in bfloat16 and are scaled and written first.
    extra = (2 + width) * count * m * k / bandwidth if width == 1 else np.zeros_like(m)
    return _gather(ways, 2 * count * m * n * k / peak, num_bytes, passing, extra, device)


@compiled
def _cut(
    m: Floats,
    n: Floats,
    k: Floats,
    count: Floats,
    a: Floats,
    b: Floats,
    splits: float,
    units: float,
    flop_s: float,
    byte_s: float,
    way: Floats,
) -> None:
    """Write the demand of products in tiles of 1/a by 1/b to ``way`` (quantities, queries) in the order of `WAYS`."""
    part, step, doublings, merged = 1 / splits, 1 / _STEP, np.log2(splits), 8 * splits if splits > 1 else 0.0
    for i in range(len(m)):
        rows, columns = np.divide(1.0, a[i]), np.divide(1.0, b[i])
        blocks = count[i] * np.ceil(m[i] * a[i]) * np.ceil(n[i] * b[i]) * splits
        waves = np.ceil(np.divide(blocks, units))
        turns = waves * k[i] * part
        way[0, i] = turns * 2 * rows * columns * flop_s
        way[1, i] = a[i] + b[i]
        way[2, i] = turns * (min(rows, m[i]) + min(columns, n[i])) * byte_s
        way[3, i] = waves
        way[4, i] = turns * step
        way[5, i] = waves * rows * columns
        way[6, i] = doublings
        way[7, i] = merged * count[i] * m[i] * n[i]
        way[8, i] = np.divide(blocks, waves * units)


def _attention(sizes: Mapping[str, Floats], dtype: str, kernel: str, device: DeviceKind, *, decode: bool) -> Demand:
    batch, heads, kv_heads, dim = (sizes[name] for name in ("batch", "heads", "kv_heads", "head_dim"))
    queries, keys, window = (sizes[name] for name in ("queries", "keys", "window"))
    name, kv_name = split_dtype(dtype)
    width, kv_width, peak = ARITHMETIC_BYTES[name], ARITHMETIC_BYTES[kv_name], peak_flops(device, name)
    bandwidth, units = device.memory_bandwidth_bytes_per_s, float(device.num_multiprocessors)
    seen = seen_keys(keys, window)
    mean = mean_keys(queries, keys, window)
    packed = packs_heads(kernel, heads / kv_heads, window) if decode else np.zeros(len(heads), bool)
    shared, groups = np.where(packed, heads / kv_heads, 1.0), np.where(packed, kv_heads, heads)
    ways = []
    for rows in _QUERY_ROWS:
        for most in _KEY_SPLITS if decode else (1,):
            splits = np.where(packed, most, 1)
            blocks = batch * groups * np.ceil(queries * shared / rows) * splits
            waves = np.ceil(blocks / units)
            depth = mean / splits
            ways.append(
                (
                    np.maximum(waves * depth, seen / splits) * 4 * rows * dim * units / peak,
                    1 / rows + 1 / dim,
                    waves * depth * 2 * dim * kv_width * units / bandwidth,
                    waves,
                    np.maximum(waves * depth, seen / splits) / _STEP,
                    waves * rows * dim,
                    np.log2(splits),
                    np.where(splits > 1, 8 * batch * heads * queries * dim * splits, 0.0),
                    blocks / (waves * units),
                )
            )
    stacked = np.array([np.broadcast_arrays(*way, batch)[:-1] for way in ways], np.float64)
    num_bytes = 2 * width * batch * heads * queries * dim + 2 * kv_width * batch * kv_heads * seen * dim
    flops = 4 * batch * heads * queries * mean * dim / peak
    return _gather(stacked, flops, num_bytes, num_bytes, np.zeros_like(batch), device)


def _gather(
    ways: Floats,
    flops: Floats,
    num_bytes: Floats,
    passing: Floats,
    extra: Floats,
    device: DeviceKind,
) -> Demand:
    return Demand(
        ways=ways,
        flops=flops,
        memory=num_bytes / device.memory_bandwidth_bytes_per_s,
        cached=passing / float(device.cache_bytes),
        extra=extra,
        bandwidth=device.memory_bandwidth_bytes_per_s,
        units=device.num_multiprocessors,
        clock_hz=device.clock_hz,
    )
