"""The demand of a GPU kernel, in seconds at datasheet rates, for each tile size that it may use.

`demand_of` returns the demand, `check_sizes` and `check_device` raise errors for invalid queries, and `tiles_of` lists
the tile sizes. A product (m, k) by (k, n) in tiles of (a, b), with k in s splits, on S multiprocessors of P/S FLOP/s
each and a memory of B bytes/s, has these quantities:

    waves   w = ⌈ ⌈m/a⌉ · ⌈n/b⌉ · s / S ⌉                rounding up is wave (tail) quantisation
    work    w · 2·a·b·(k/s) / (P/S)                      arithmetic of whole tiles (tile quantisation), seconds
    pull    w · (a + b)·(k/s)·width / (B/S)              loads of a block, at its share of the memory's bandwidth
    steps   w · (k/s) / 64                               iterations of the inner loop, each with its latency
    area    w · a·b                                      elements that the blocks of one multiprocessor write
    fill    ⌈m/a⌉ · ⌈n/b⌉ · s / (w·S)                    thread blocks / capacity of all waves
    merge   s > 1: 2·4·m·n·s bytes                       partial sums written and read again

A batch of products has ``count`` times the blocks and bytes. Attention with d elements per head has the same
quantities, with queries as rows, keys as the inner dimension (the average number of unmasked keys), and 4·d FLOPs per
pair. Decoding packs the query heads of one key head into the rows.

Sources: NVIDIA, Matrix Multiplication Background User's Guide; Dao, FlashAttention-2 (2023), and Flash-Decoding (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.compiled import compiled
from meshwright.cost.roofline import peak_flops
from meshwright.spec import DeviceKind, MeasurementError
from meshwright.spec.units import ARITHMETIC_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import ArrayLike, NDArray

    from meshwright.cost.costs import Floats


# The sizes of a query, by op.
SIZES: dict[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "attention_prefill": ("batch", "heads", "kv_heads", "head_dim", "queries", "keys", "window"),
    "attention_decode": ("batch", "heads", "kv_heads", "head_dim", "queries", "keys", "window"),
}
# At a byte each, this number of elements is a terabyte: more than the memory of any device.
MAX_SIZE = 2**40
# Optional sizes with their defaults.
_OPTIONAL = {"matmul": {"count": 1.0}}


def is_tiled(device: DeviceKind) -> bool:
    """Return whether a device kind has the figures for kernel predictions: multiprocessors, cache and clock."""
    return bool(device.num_multiprocessors and device.cache_bytes and device.clock_hz)


def split_dtype(dtype: str) -> tuple[str, str]:
    """Return the dtypes of the arithmetic and of keys and values from a record's dtype.

    "bfloat16:kv=float8_e4m3fn" gives ("bfloat16", "float8_e4m3fn"); without "kv=", both are equal. Other suffixes, such
    as the scaling, are dropped.
    """
    first, _, rest = dtype.partition(":")
    return first, rest.removeprefix("kv=") if rest.startswith("kv=") else first


def has_rate(device: DeviceKind, dtype: str) -> bool:
    """Return whether a device kind has a peak FLOP/s for a record's dtype, and both dtypes have a known width."""
    arithmetic, values = split_dtype(dtype)
    return arithmetic in ARITHMETIC_BYTES.keys() & device.peak_flops_per_s.keys() and values in ARITHMETIC_BYTES


# Valid queries:
#
# - device: states multiprocessors, cache and clock
# - dtype: arithmetic at a rate that the datasheet states (no float8 without one), keys and values of a known width
# - sizes: 1 ≤ size ≤ 2⁴⁰; a window may be 0 (no window); query heads are at least as many as heads of keys
def check_device(device: DeviceKind, dtype: str) -> None:
    """Raise MeasurementError if a device kind lacks figures that the prediction of kernels in ``dtype`` needs."""
    if not is_tiled(device):
        raise MeasurementError(
            f"Device kind {device.name!r} states no multiprocessors, cache or clock; without them kernels on it are "
            "not predicted. State num_multiprocessors, cache_bytes and clock_hz of the device kind."
        )
    if not has_rate(device, dtype):
        known = ", ".join(sorted(ARITHMETIC_BYTES.keys() & device.peak_flops_per_s.keys())) or "none"
        raise MeasurementError(
            f"Kernels in {dtype!r} on {device.name!r} are not predicted; expected a floating-point dtype that its "
            f"datasheet states a rate of ({known}). Use one of these, or state the rate in peak_flops_per_s of the "
            "device kind."
        )


def wrong_sizes(columns: Mapping[str, Floats]) -> dict[str, NDArray[np.bool_]]:
    """Return, by the name of a size, a mask of shape (queries,) of the queries in which this size is invalid.

    ``columns``: the sizes of an op, named as in `SIZES`, each of shape (queries,).
    """
    wrong = {
        name: ~((column >= (0 if name == "window" else 1)) & (column <= MAX_SIZE)) for name, column in columns.items()
    }
    if "kv_heads" in columns:
        wrong["kv_heads"] |= columns["kv_heads"] > columns["heads"]
    return wrong


def check_sizes(op: str, sizes: Mapping[str, ArrayLike]) -> dict[str, Floats]:
    """Return the sizes of n queries as columns of shape (n,); a single number is repeated. ``op`` is one of `SIZES`.

    Raises MeasurementError for missing, unknown or invalid sizes, for values that are not numbers, and for unequal
    lengths.
    """
    names, optional = SIZES[op], _OPTIONAL.get(op, {})
    missing, unknown = [name for name in names if name not in sizes], set(sizes) - {*names, *optional}
    if missing or unknown:
        said = ", ".join(missing) or "unknown " + ", ".join(sorted(unknown))
        raise MeasurementError(f"{op}: {'missing sizes ' if missing else ''}{said}; expected {', '.join(names)}.")
    columns = _broadcast(op, {name: np.asarray(column) for name, column in (optional | dict(sizes)).items()})
    for name, wrong in wrong_sizes(columns).items():
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise MeasurementError(
                f"{op}: {name} is {columns[name][place]:g} in query {place}; expected a positive number up to "
                f"{MAX_SIZE}" + (", and at most as many as heads." if name == "kv_heads" else ".")
            )
    return columns


def _broadcast(op: str, given: dict[str, NDArray[np.generic]]) -> dict[str, Floats]:
    lengths = {len(column) for column in given.values() if column.ndim}
    for name, column in given.items():
        if not (column.dtype.kind in "iuf" or not column.size) or column.ndim > 1:
            raise MeasurementError(
                f"{op}: {name} has dtype {column.dtype} and shape {column.shape}; expected one number, or one number "
                "per query."
            )
    if len(lengths - {1}) > 1:
        raise MeasurementError(
            f"{op}: the sizes have different lengths ({', '.join(map(str, sorted(lengths)))}); expected one number for "
            "each query, or one number for all queries."
        )
    count = (lengths - {1} or {1}).pop()
    # Compiled loops need contiguous columns.
    return {
        name: np.ascontiguousarray(np.broadcast_to(column.astype(np.float64), count)) for name, column in given.items()
    }


Dispatch = Literal["library", "no split", "sm90", "sm89"]
# (rows of the tile, its columns, splits), each of shape (queries,) or a number.
Tile = tuple["Floats | float", "Floats | float", int]

CANDIDATES = (
    (16, 64),
    (16, 128),
    (32, 128),
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (64, 256),
    (128, 256),
    (256, 128),
)
SPLITS = (1, 2, 4, 8, 16)

_FLASH_2 = "vllm_flash_attn_fa2"
# Names of one kernel family in different versions of a framework.
_RENAMED = {"vllm_default": "torch.nn.functional.linear", "vllm_flash_attn": "vllm_flash_attn_fa2"}
_CUTLASS = "CutlassFP8ScaledMMLinearKernel"
_READ: dict[float, Dispatch] = {8.9: "sm89", 9.0: "sm90"}
_NO_SPLIT = ("DeepGemm", "FlashInfer", "Triton", "CutlassFp8BlockScaled")


def family_of(kernel: str) -> str:
    """Return the name of a kernel's family, which is equal for all versions of a framework."""
    return _RENAMED.get(kernel, kernel)


def dispatch_of(kernel: str, compute_capability: float) -> Dispatch:
    """Return how a kernel family chooses its tiles (see `tiles_of`) on devices of a CUDA compute capability."""
    if kernel == _CUTLASS:
        # The code for other devices was not read: any tile is possible.
        return _READ.get(compute_capability, "library")
    return "no split" if kernel.startswith(_NO_SPLIT) else "library"


# A thread block computes a tile of (rows, columns) of the output over ``splits``-ths of the inner dimension:
#
#     library   cuBLAS behind torch's linear chooses from many: the fastest of CANDIDATES with any of SPLITS is used
#     no split  DeepGEMM, FlashInfer, Triton and block-scaled CUTLASS choose a tile, and never split the inner dimension
#     sm90      vLLM's CUTLASS float8 kernels for Hopper: by rows and columns (scaled_mm_sm90_fp8_dispatch.cuh); up to
#               64 rows the operands are swapped, so that 64 columns and 16 or 64 rows make a tile
#     sm89      the same for Ada (scaled_mm_c2x_sm89_fp8_dispatch.cuh); that for Blackwell was not read
#
# Decoding attention may pack the query heads of one key head into the rows of a tile, and then splits the keys;
# FlashAttention 2 does so only without a window and for more than one head (flash_api.cpp, seqlenq_ngroups_swapped).
#
# Sources: vllm-project/vllm, csrc/quantization/w8a8 (Apache-2.0, 2025), read for the sizes; NVIDIA, Matrix
# Multiplication Background User's Guide, "tile and wave quantization", for the tiles that cuBLAS uses;
# Dao-AILab/flash-attention.
def tiles_of(dispatch: Dispatch, m: Floats, n: Floats, k: Floats) -> Iterator[Tile]:
    """Yield the tiles (rows, columns, splits of k) that a kernel may use for products of (m, k) by (k, n).

    The sizes have shape (queries,), and so have rows and columns that depend on them; otherwise they are numbers.
    """
    if dispatch == "library":
        yield from ((rows, columns, splits) for rows, columns in CANDIDATES for splits in SPLITS)
    elif dispatch == "no split":
        yield from ((rows, columns, 1) for rows, columns in CANDIDATES)
    elif dispatch == "sm90":
        rows = np.select(
            [m <= 16, (m <= 64) & (n <= 1280), m <= 128, (m >= 8192) & (k >= 6144)], [16, 16, 64, 256], 128
        )
        yield rows, np.where(m <= 64, 64, 128), 1
    else:
        wide = 2 ** np.ceil(np.log2(n))
        few, some = m <= 64, m <= 128
        rows = np.select(
            [m <= 32, few, some & (wide <= 8192), some, (m <= 256) & (wide <= 4096), m <= 256, wide == 8192],
            [32, 64, 64, 128, 64, 128, 256],
            128,
        )
        columns = np.select([few & (wide == 16384), few, some & (wide > 16384)], [128, 64, 64], 128)
        yield rows, columns, 1


def packs_heads(kernel: str, shared: Floats, window: Floats) -> NDArray[np.bool_]:
    """Return, per query, whether decoding packs the query heads of one key head into a tile and splits the keys.

    ``shared``: query heads per key head; ``window``: that of the attention, 0 without one; both of shape (queries,).
    """
    if family_of(kernel) == _FLASH_2:
        packed: NDArray[np.bool_] = (shared > 1) & (window == 0)
        return packed
    return np.ones(len(shared), bool)


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
    """The demand of n queries, for each of c tile sizes; arrays in seconds unless stated otherwise.

    ``ways``: shape (c, quantities, n), with the quantities of the module in the order of `WAYS`; "loads" are elements
    loaded per pair of FLOPs in a tile, 1/a + 1/b, and "doublings" log₂ of the splits. The other arrays have shape (n,).
    ``flops``, ``memory``: arithmetic at the peak rate, and all bytes at the memory bandwidth. ``extra``: additional
    passes (quantisation). ``cached``: bytes that pass between two uses of the same data / bytes of the cache.
    ``bandwidth``: bytes/s. ``units``: multiprocessors.
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
        """Return one of the quantities of `WAYS` for each tile size and query, shape (c, n)."""
        return self.ways[:, WAYS.index(quantity)]


def demand_of(op: str, sizes: Mapping[str, Floats], dtype: str, kernel: str, device: DeviceKind) -> Demand:
    """Return the demand of queries of one op (a key of `SIZES`), dtype and kernel family.

    ``sizes``: columns of shape (queries,). The device kind must pass `check_device`.
    """
    if op == "matmul":
        return _product(sizes, dtype, kernel, device)
    return _attention(sizes, dtype, kernel, device, decode=op == "attention_decode")


def seen_keys(keys: Floats, window: Floats) -> Floats:
    """Return the largest number of keys to which a query attends; a ``window`` of 0 means all keys."""
    return np.where(window > 0, np.minimum(window, keys), keys)


def mean_keys(queries: Floats, keys: Floats, window: Floats) -> Floats:
    """Return the mean number of keys to which a query attends under a causal mask.

    The last query is aligned with the last key. A ``window`` of 0 means no window.
    """
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
