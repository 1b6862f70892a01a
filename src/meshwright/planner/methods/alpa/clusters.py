"""Operator clustering: merge many layers into few, so that stages have fewer possible cuts (Alpa, section 5.2).

Layers are merged into l runs by dynamic programs over (layers, runs): first the smallest possible maximum of bytes that
enter a run; among those the least sum of these bytes, then the least variance of the runs' FLOPs. A run has at most (1
+ ε) times the mean FLOPs, or the FLOPs of the largest layer if that is more.
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.methods.alpa.conversions import Integers
from meshwright.planner.methods.alpa.mesh import Floats
from meshwright.spec import PlanError

# Alpa's own slack ε of a layer's FLOPs, its option `layer_construct_eps`.
SLACK = 0.6


def cluster_layers(entering_bytes: Floats, flops: Floats, num_clusters: int, slack: float = SLACK) -> tuple[int, ...]:
    """Return the edges of the runs: 0, the start of each next run, and the number of layers.

    ``entering_bytes`` (L,) cross the boundary before each layer; ``flops`` (L,) are those of each layer. If the limit
    on FLOPs allows no such runs, it is raised by tenths until it does. Raises PlanError for an impossible number of
    runs.
    """
    num_layers = len(flops)
    if not 1 <= num_clusters <= num_layers:
        raise PlanError(f"{num_layers} layers were to be merged into {num_clusters}; expected 1 to {num_layers}.")
    limit = max((1 + slack) * flops.sum() / num_clusters, float(flops.max(initial=0.0)))
    while True:
        most = _least_largest(entering_bytes, flops, num_clusters, limit)
        if np.isfinite(most):
            starts = _least_sums(entering_bytes, flops, num_clusters, limit, most)
            return (*starts.tolist(), num_layers)
        limit *= 1.1


@compiled
def _least_largest(entering: Floats, flops: Floats, num_clusters: int, limit: float) -> float:
    """Return the smallest possible maximum of bytes that enter a run."""
    num_layers = len(flops)
    best = np.full((num_clusters + 1, num_layers + 1), np.inf)
    best[0, num_layers] = 0.0
    for runs in range(1, num_clusters + 1):
        for i in range(num_layers - 1, -1, -1):
            size = 0.0
            for j in range(i + 1, num_layers + 1):
                size += flops[j - 1]
                if size > limit * (1.0 + 1e-12):
                    break
                best[runs, i] = min(best[runs, i], max(entering[i], best[runs - 1, j]))
    return float(best[num_clusters, 0])


@compiled
def _least_sums(entering: Floats, flops: Floats, num_clusters: int, limit: float, most: float) -> Integers:
    """Return the starts of the runs with the least sum of bytes, then of squared FLOPs."""
    num_layers = len(flops)
    sums = np.full((num_clusters + 1, num_layers + 1), np.inf)
    squares = np.full((num_clusters + 1, num_layers + 1), np.inf)
    stops = np.zeros((num_clusters + 1, num_layers + 1), np.int64)
    sums[0, num_layers] = squares[0, num_layers] = 0.0
    for runs in range(1, num_clusters + 1):
        for i in range(num_layers - 1, -1, -1):
            if entering[i] > most:
                continue
            size = 0.0
            for j in range(i + 1, num_layers + 1):
                size += flops[j - 1]
                if size > limit * (1.0 + 1e-12):
                    break
                total, square = entering[i] + sums[runs - 1, j], size * size + squares[runs - 1, j]
                if total < sums[runs, i] or (total == sums[runs, i] and square < squares[runs, i]):
                    sums[runs, i], squares[runs, i], stops[runs, i] = total, square, j
    starts = np.zeros(num_clusters, np.int64)
    for runs in range(num_clusters, 1, -1):
        starts[num_clusters - runs + 1] = stops[runs, starts[num_clusters - runs]]
    return starts
