"""Exact slicing of a chain of layers into replicated stages.

The model. Layers 0..L-1 in order; ranks 0..D-1 in order. Stage s holds layers i:j on the r ranks a..a+r-1, with a ranks
before it, and each of its replicas works on at most n = ceil(M / r) of the M microbatches. With

    t = seconds[k, i, j]         forward and backward of one microbatch, on the ranks' kind k = kind_of[a, r]
    x = transfer_s[l, i]         input of the stage per microbatch and its gradient, over the link l = link_of[a, r]
    g = exchange_bytes[i, j]     gradients to reduce: whole buckets at bucket_s[a, r], the rest from latency_s[a, r] up
    e = exchange(g)              0 if r = 1; with overlap, max(e - backward, its last bucket alone)
    o = optimizer_s[k, i, j]

a slicing costs

    f · sum_s (t_s + x_s)  +  max_s ((n_s - f) max(t_s, x_s) + e_s + o_s)

that is, the first microbatch's way through all stages, then the busiest stage's other microbatches, its gradient
reduction and its optimizer; f = 1. In inference there is no flush, steps follow each other without a gap, and f = 0.
Without replicas, transfers and reduction this is Alpa's sum + (M - 1) max. A stage fits if

    static_bytes + beside_bytes + n · input_bytes + (exchange_bytes if r > 1, for the buckets' buffers)
        + the fullest moment of a step (`cost.memory.fullest`)  <=  memory_limit[a, r]        all at [i, j]

where each microbatch keeps flight_bytes + leaving_bytes, with in_flight[a, r] in flight: n (GPipe),
min(n, ceil((D - a) / r)) (1F1B), or counted from an own schedule.

The method. For a threshold θ on the second term, the least sum over slicings whose stages all stay within θ is a small
dynamic program (module `dynamic_program`); the best θ is found by `thresholds`.

Sources: Zheng et al., "Alpa" (OSDI 2022), section 5.2 (enumeration of the bottleneck); Narayanan et al., "PipeDream"
(SOSP 2019), section 3.1 (replicated stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.methods.slicing.dynamic_program import (
    SlicingProblem,
    SlicingTables,
    bottleneck_of,
    fill_tables,
    make_tables,
)
from meshwright.planner.thresholds import minimise_over_thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """Stages of layers ``bounds[s]`` with ``replicas[s]`` ranks each; seconds by the closed form, and its two terms."""

    bounds: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]
    seconds: float
    sum_s: float
    bottleneck_s: float


def solve_slicing(
    problem: SlicingProblem,
    *,
    replicas: Sequence[int] | None = None,
    num_stages: int | None = None,
    cutoff_s: float = np.inf,
) -> Slicing | None:
    """Return the cheapest slicing that fits and uses every rank; None if there is no slicing below ``cutoff_s``.

    ``replicas`` are the allowed numbers of replicas of a stage (default: any), ``num_stages`` the number of stages
    (default: any). The result is exact up to rounding, and deterministic.
    """
    most = min(problem.num_ranks, problem.num_microbatches)
    choices = np.array(sorted({r for r in replicas or range(1, most + 1) if 1 <= r <= most}), np.int64)
    if not len(choices):
        return None
    tables = make_tables(problem, num_stages or 0)

    def solve(theta: float) -> tuple[Slicing | None, float]:
        above = fill_tables(problem, choices, theta, tables)
        return _read_slicing(problem, tables), above

    return minimise_over_thresholds(solve, cutoff_s)


def _read_slicing(problem: SlicingProblem, tables: SlicingTables) -> Slicing | None:
    """Return the slicing with the least sum in filled tables; None if no slicing fits."""
    stage, layer, left = len(tables.sums) - 1, 0, problem.num_ranks
    sum_s = float(tables.sums[stage, left, layer])
    if not np.isfinite(sum_s):
        return None
    bounds, replicas, bottleneck_s = [], [], 0.0
    while layer < problem.num_layers:
        stop, take = int(tables.stops[stage, left, layer]), int(tables.takes[stage, left, layer])
        bounds.append((layer, stop))
        replicas.append(take)
        bottleneck_s = max(bottleneck_s, bottleneck_of(problem, layer, stop, problem.num_ranks - left, take))
        stage, layer, left = max(stage - 1, 0), stop, left - take
    return Slicing(
        bounds=tuple(bounds),
        replicas=tuple(replicas),
        seconds=sum_s + bottleneck_s,
        sum_s=sum_s,
        bottleneck_s=bottleneck_s,
    )
