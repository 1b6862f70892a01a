"""The input of the second stage: how the law explains a query, its sizes, and how they fit tiles.

Shares and ratios come first, so that what is learned on one device is useful on another; sizes follow, because
libraries choose kernels by them. No feature names the device: only the generation of its code is included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.kernels.checks import SIZES
from meshwright.cost.kernels.demand import seen_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from meshwright.cost.kernels.demand import Demand
    from meshwright.cost.kernels.law import Explained
    from meshwright.cost.prediction import Floats

# The number of first features by which the similarity to measured rows is judged (`cost.kernels.correction`).
NUM_PLACED = 10


def features_of(
    op: str, sizes: Mapping[str, Floats], demand: Demand, explained: Explained, family: int, capability: float
) -> NDArray[np.float32]:
    """Return the features of n queries of one op, kernel family and CUDA compute capability, shape (features, n)."""
    chosen = demand.ways[explained.way, :, np.arange(len(explained.way))].T
    _, loads, pull, waves, steps, _, doublings, _, fill = chosen
    seconds = explained.seconds
    logs = [np.log1p(sizes[name]) for name in SIZES[op]]
    placed = [
        np.log(explained.compute / seconds),
        np.log(explained.memory / seconds),
        np.log(demand.flops / demand.memory),
        np.log(demand.cached),
        np.log(waves),
        fill,
        np.log(seconds),
        *logs[-3:],
    ]
    shares = [
        -np.log(loads),
        np.log(2) * doublings,
        np.log(pull / seconds),
        np.log(steps),
    ]
    known = [np.full(len(seconds), number) for number in (family, capability)]
    return np.stack([*placed, *shares, *logs[:-3], *_alignment(op, sizes), *known]).astype(np.float32)


def num_features(op: str) -> int:
    """Return the number of features of an op: placed ones, shares, other sizes, alignment, family and capability."""
    return NUM_PLACED + 6 + len(SIZES[op]) - 3 + (6 if op == "matmul" else 4)


def _alignment(op: str, sizes: Mapping[str, Floats]) -> list[Floats]:
    if op == "matmul":
        m, n, k = (sizes[name] for name in SIZES[op])
        return [np.ceil(m / 64) * 64 / m, np.ceil(m / 16) * 16 / m, m % 8, n / 2 ** np.ceil(np.log2(n)), np.log(m * n),
                np.log(n / k)]  # fmt: skip
    shared = sizes["heads"] / sizes["kv_heads"]
    whole = sizes["queries"] * shared
    seen = seen_keys(sizes["keys"], sizes["window"])
    return [np.log(shared), np.ceil(whole / 64) * 64 / whole, np.log(sizes["batch"] * sizes["kv_heads"]), np.log(seen)]
