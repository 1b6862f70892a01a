"""How long a matrix product takes on a device when nothing else runs: the predictor of kernels, asked once per size.

What it does not know (a device kind without multiprocessors, cache or clock, a dtype without a rate, sizes that no
device can hold) runs as the roofline says: max(FLOPs / peak, bytes / bandwidth) + launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.kernels import Kernel, is_tiled, shipped_model
from meshwright.cost.kernels.checks import MAX_SIZE, has_rate
from meshwright.cost.roofline import LAUNCH_S, peak_flops

if TYPE_CHECKING:
    from collections.abc import Hashable

    from meshwright.cost.steps.counted import CountedOp
    from meshwright.spec import DeviceKind

# Operations per second that products of random numbers sustain in 16 bits at the power limit, however short bursts run:
# 8192 x 8192 x 8192 on an A100 of 400 W (H. He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given
# Predictable Data", thonking.ai, 2024: 258 TFLOP/s, 295 with zeros).
_SUSTAINED = {"A100": 258e12}
# Sizes are asked again for every layout of a model; so many are kept.
_MOST_KEPT = 2**16
_kept: dict[Hashable, float] = {}


def product_seconds(kind: DeviceKind, dtype: str, op: CountedOp) -> float:
    """Seconds of one run of a matmul or bmm of ``dtype``."""
    key = (
        kind.name,
        kind.memory_bandwidth_bytes_per_s,
        kind.peak_flops_per_s.get(dtype),
        kind.num_multiprocessors,
        kind.cache_bytes,
        kind.clock_hz,
        kind.compute_capability,
        dtype,
        op.op,
        op.sizes,
    )
    if key not in _kept:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[key] = _ask(kind, dtype, op)
    return _kept[key]


def _ask(kind: DeviceKind, dtype: str, op: CountedOp) -> float:
    size = dict(op.sizes)
    sizes = {"m": size["m"], "n": size["n"], "k": size["k"], "count": size.get("batch", 1)}
    if not (is_tiled(kind) and has_rate(kind, dtype)) or max(sizes.values()) > MAX_SIZE:
        bound = max(op.flops / peak_flops(kind, dtype), op.num_bytes / kind.memory_bandwidth_bytes_per_s)
        return bound + LAUNCH_S
    kernel = Kernel(op="matmul", dtype=dtype, device=kind)
    columns = {name: np.array([float(number)]) for name, number in sizes.items()}
    alone = float(shipped_model().predict(kernel, columns).seconds[0])
    sustained = _SUSTAINED.get(kind.name) if dtype != "float8_e4m3fn" else None
    return max(alone, op.flops / sustained) if sustained else alone
