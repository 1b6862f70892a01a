"""Seconds of `scaled_dot_product_attention` on CUDA devices, by the kernel that torch chooses.

    t = fixed + 4·heads·queries·keys·width·f · (1 + short / keys) / (share · peak)       f: ½ under a causal mask
    t = fixed + bytes / bandwidth                                                        the longer of both

cudnn      16-bit types without a mask, on devices of compute capability 9 and 10 (torch 2.11, sdp_utils.cpp)
flash      the same on others, and with older software (`cost.software`): FlashAttention-2, or its first version
efficient  float32, a mask, wide heads or older devices: CUTLASS kernels; in 16 bits 1.8 times as long as flash, in
           float32 three times as long as that
math       a mask with a gradient that is a view of another tensor, step by step and in float32: scores pass through
           memory

``share`` of the peak by the width of a head, and ``short``, a number of additional keys, are read from the tables of
FlashAttention-3 (Shah et al. 2024, figures 5 and 6: cuDNN and FlashAttention-2 on H100 SXM5, 512 to 16,384 keys). On
devices of compute capability 8: 73 % of the peak forward and 63 % backward (Dao, FlashAttention-2, 2023, A100; width
128), less for narrower heads in the same proportion. A causal mask adds half a block of 128 queries and the idle time
at an uneven end of the grid: 245 keys in the same tables. CUTLASS: xFormers in figure 4 of FlashAttention-2; float32
over float16 from the benchmarks of xFormers' pull request 587 (A100).

Causal attention of fewer queries than keys belongs to a rank with a part of each sequence (context parallelism). In a
plain model torch would start the mask at the first key, which no known model needs. The runtime gives tokens to ranks
in order and makes the mask, so that the kernel is "efficient"; the last rank computes with all keys, and the others
wait for it: f is 1. Other software gives each rank tokens of the beginning and of the end: f is ½.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshwright.cost.gpu.products import between
from meshwright.cost.prediction import Interval
from meshwright.cost.roofline import LAUNCH_S, RooflineSeconds, peak_flops
from meshwright.cost.software import PYTORCH, Software
from meshwright.cost.work import ATTENTION_BACKWARD
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.cost.work.calls import OpCall
    from meshwright.spec import DeviceKind, Graph, Op

# The figures are from others, with other versions of the libraries.
ATTENTION = Interval(low=0.75, high=1.35)
# Queries, keys and values; a mask is the fourth input.
_NUM_UNMASKED = 3
# One preparing and one computing kernel.
_FIXED_S = 5e-6
_WIDTHS = [math.log(width) for width in (64, 128, 256)]
# Shares of the peak for long sequences by the width of a head, forward and backward.
_SHARES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cudnn": ((0.417, 0.605, 0.587), (0.438, 0.523, 0.523)),
    "flash": ((0.327, 0.374, 0.330), (0.294, 0.325, 0.325)),
    "flash 8": ((0.64, 0.73, 0.64), (0.57, 0.63, 0.63)),
}
# Additional keys of short sequences, forward and backward, and more of them under a causal mask.
_SHORT: dict[str, tuple[float, float]] = {"cudnn": (115.0, 290.0), "flash": (77.0, 240.0), "flash 8": (77.0, 240.0)}
_CAUSAL_SHORT = 245.0
_EFFICIENT, _EFFICIENT_FLOAT32 = 1.8, 3.0
# How often scores and heads pass through memory step by step, and the number of kernels, forward and backward, counted
# in _scaled_dot_product_attention_math and _safe_softmax (torch 2.11, attention.cpp): scaled and copied heads, product,
# mask, softmax, whether a row is empty (two reads), where, dropout, product; the backward the same, softmax with two
# kernels, and the sum for the mask. At softmax's share of the bandwidth (`models/gpu.json`: 0.7 to 0.9).
_SCORES, _HEADS, _KERNELS, _SCORES_SHARE = (12, 16), (3.5, 4.25), (13, 16), 0.8
# The share of the float32 peak that products of scores reach (`h100_ops.parquet`: bmm, median).
_SCORES_RATE = 0.57
_AMPERE, _HOPPER, _AFTER_BLACKWELL = 8.0, 9.0, 11.0
# FlashAttention reaches 25 to 40 % of an A100's peak, FlashAttention-2 50 to 73 % (Dao 2023, abstract): the middles.
_FLASH_1 = 0.615 / 0.325
# The widest heads that flash and cuDNN support.
_WIDEST = 256


def kernel_of(graph: Graph, op: Op, call: OpCall, dtype: str, kind: DeviceKind, software: Software = PYTORCH) -> str:
    """Return the kernel that the software uses: cudnn, flash, flash 8, efficient or math."""
    if len(op.inputs) > _NUM_UNMASKED:
        mask = graph.tensors[op.inputs[_NUM_UNMASKED]]
        if mask.requires_grad and mask.storage != op.inputs[_NUM_UNMASKED]:
            return "math"
    without_flash = DTYPE_BYTES.get(dtype) != 2 or call.shapes[0][-1] > _WIDEST or kind.compute_capability < _AMPERE
    masked = len(op.inputs) > _NUM_UNMASKED or (_is_part(call) and not software.balanced_context)
    if masked or without_flash:
        return "efficient"
    if software.attention == "torch" and _HOPPER <= kind.compute_capability < _AFTER_BLACKWELL:
        return "cudnn"
    return "flash" if kind.compute_capability >= _HOPPER else "flash 8"


def attention_seconds(
    graph: Graph, op: Op, call: OpCall, dtype: str, kind: DeviceKind, *, trained: bool, software: Software = PYTORCH
) -> RooflineSeconds:
    """Return the seconds of one attention; ``call``: its sizes."""
    query, keys = call.shapes[0], call.shapes[1][-2]
    heads, width = math.prod(query[:-2]), query[-1]
    causal = call.attributes.get("is_causal") == "True"
    seen = 0.5 if causal and (software.balanced_context or not _is_part(call)) else 1.0
    name = kernel_of(graph, op, call, dtype, kind, software)
    element = DTYPE_BYTES.get(dtype, 4)
    flops = 4.0 * heads * query[-2] * keys * width
    moved = float(element * sum(math.prod(shape) for shape in call.shapes[:3]) + element * math.prod(query))
    if name == "math":
        scores, moved = 4.0 * heads * query[-2] * keys, moved * 4 / element
        times = [
            (many * moved + count * scores) / (_SCORES_SHARE * kind.memory_bandwidth_bytes_per_s)
            + part * flops / (_SCORES_RATE * peak_flops(kind, "float32"))
            + kernels * LAUNCH_S
            for many, count, kernels, part in zip(_HEADS, _SCORES, _KERNELS, (1.0, 2.0), strict=True)
        ]
        return RooflineSeconds(forward_s=times[0], backward_s=times[1] if trained else 0.0, accumulate_s=0.0)
    slower, fused = _FLASH_1 if software.attention == "flash-1" and name.startswith("flash") else 1.0, name
    if name == "efficient":
        slower = _EFFICIENT * (_EFFICIENT_FLOAT32 if element > 2 else 1.0)
        fused = "flash" if kind.compute_capability >= _HOPPER else "flash 8"
    peak = kind.peak_flops_per_s.get("bfloat16") or peak_flops(kind, "float16")
    parts = []
    for backward in (False, True):
        share = between(math.log(width), _WIDTHS, _SHARES[fused][backward])
        short = _SHORT[fused][backward] + _CAUSAL_SHORT * causal
        times_flops = flops * seen * (ATTENTION_BACKWARD if backward else 1.0)
        computing = slower * times_flops * (1 + short / keys) / (share * peak)
        moving = (1 + backward) * moved / kind.memory_bandwidth_bytes_per_s
        parts.append(_FIXED_S + max(computing, moving))
    return RooflineSeconds(forward_s=parts[0], backward_s=parts[1] if trained else 0.0, accumulate_s=0.0)


def _is_part(call: OpCall) -> bool:
    """Return whether a rank computes causal attention of its part of each sequence."""
    return call.attributes.get("is_causal") == "True" and call.shapes[0][-2] < call.shapes[1][-2]
