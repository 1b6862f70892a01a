"""The output tiles of a GEMM kernel, by family, as its source dispatches them.

A thread block computes a tile of (rows, columns) of the output over ``splits``-ths of the inner dimension:

    library   cuBLAS behind torch's linear chooses from many: the fastest of CANDIDATES with any of SPLITS is used
    no split  DeepGEMM, FlashInfer, Triton and block-scaled CUTLASS choose a tile, and never split the inner dimension
    sm90      vLLM's CUTLASS float8 kernels for Hopper: by rows and columns (scaled_mm_sm90_fp8_dispatch.cuh); up to 64
              rows the operands are swapped, so that 64 columns and 16 or 64 rows make a tile
    sm89      the same for Ada (scaled_mm_c2x_sm89_fp8_dispatch.cuh); that for Blackwell was not read

Decoding attention may pack the query heads of one key head into the rows of a tile, and then splits the keys;
FlashAttention 2 does so only without a window and for more than one head (flash_api.cpp, seqlenq_ngroups_swapped).

Sources: vllm-project/vllm, csrc/quantization/w8a8 (Apache-2.0, 2025), read for the sizes; NVIDIA, Matrix Multiplication
Background User's Guide, "tile and wave quantization", for the tiles that cuBLAS uses; Dao-AILab/flash-attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from meshwright.cost.prediction import Floats

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
    """Return the common name of all versions of a kernel family."""
    return _RENAMED.get(kernel, kernel)


def dispatch_of(kernel: str, compute_capability: float) -> Dispatch:
    """Return how a kernel family chooses its tiles on a device of this CUDA compute capability."""
    if kernel == _CUTLASS:
        # The code for other devices was not read: any tile is possible.
        return _READ.get(compute_capability, "library")
    return "no split" if kernel.startswith(_NO_SPLIT) else "library"


def tiles_of(dispatch: Dispatch, m: Floats, n: Floats, k: Floats) -> Iterator[Tile]:
    """Yield the tiles that a kernel may use for products of (m, k) by (k, n), each of shape (queries,)."""
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
    """Return, per query, whether decoding packs the ``shared`` query heads of a key head and splits the keys."""
    if family_of(kernel) == _FLASH_2:
        packed: NDArray[np.bool_] = (shared > 1) & (window == 0)
        return packed
    return np.ones(len(shared), bool)
