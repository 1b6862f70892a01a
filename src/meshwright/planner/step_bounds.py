"""Lower bound of the step time of all plans of a space, from the same costs that the simulator uses.

Stage i:j has r replicas, each of which computes n = ceil(M / r) of M microbatches. In seconds, on the fastest device
kind: t(i, j) is a microbatch in the stage, o(i, j) its optimizer step, P(i) a microbatch in all layers before i. A step
takes at least each of

    own work      n · t(i, j) + o(i, j)          for every stage, on its own ranks
    fill, drain   P(i) + n · t(i, j)             for synchronous schedules with whole backwards: stage i:j can start
    only
                                                 after the forward of a microbatch in the layers before it; the step
                                                 ends after the backward of the last microbatch in these layers
    all work      M · Σ w(l) / Σ over ranks of max over layers (w(l) / t(l))
                                                 for any weights w of the layers; here, t on the fastest kind

Of all slicings, the least maximum of the first two is found by bisection: for a threshold θ, a small dynamic program
finds the fewest ranks on which all stages of the layers 0..j take at most θ. It ignores transfers, gradient reductions
and memory, so the bound holds for all layouts, exchanges and placements. If ranks hold several stages, the bound is
the third one, or the time of one microbatch in all layers if that is longer.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.planner.short import is_plain_chain
from meshwright.planner.space import Space
from meshwright.planner.stage_tables import Tables
from meshwright.spec.schedules import NAMED_SCHEDULES, WHOLE_BACKWARDS, layout_of

Floats = NDArray[np.float64]

# Bisection ends when both ends agree to this share.
_PRECISION = 1e-6
# The cost model rounds to picoseconds per op, the simulator per instruction.
ROUNDING = 1 - 1e-6


def bound_space(space: Space) -> float:
    """Return a lower bound, in seconds, of the step times of all plans of the space."""
    return min((bound_tables(space, space.tables(size)) for size in space.microbatch_sizes), default=math.inf)


def bound_tables(space: Space, tables: Tables) -> float:
    """Return a lower bound, in seconds, of the step times of all plans of the space at one microbatch size."""
    bounds = [_bound_schedule(space, tables, schedule) for schedule in space.schedules]
    return min(bounds, default=math.inf) * ROUNDING


def _bound_schedule(space: Space, tables: Tables, schedule: str) -> float:
    training = space.workload.kind == "training"
    work_s = _all_work(space, tables)
    alone = schedule in NAMED_SCHEDULES and layout_of(schedule) == "single"
    # Where a backward is split, its weight part may wait and delays no other stage.
    flushes = training and schedule in WHOLE_BACKWARDS
    kinds = list(tables.seconds.values())
    total = np.minimum.reduce([kind.total - kind.accumulate for kind in kinds])
    first = total[0] if flushes and _is_trained_from_the_start(tables) else np.zeros_like(total[0])
    if not alone:
        return max(work_s, float(first[-1]))
    # Where the host runs the optimizer, its cost depends on the devices used, and gradients may be in host memory.
    here = space.offload.optimizer == "device"
    later = np.minimum.reduce([kind.total for kind in kinds]) if here else total
    optimizer = np.minimum.reduce([kind.optimizer for kind in kinds]) * here
    most = min(space.num_ranks, tables.num_microbatches)
    if space.exchange.zero:
        optimizer = optimizer / most
    return max(work_s, _slice(total, later, optimizer, first, tables.num_microbatches, space.num_ranks))


def _is_trained_from_the_start(tables: Tables) -> bool:
    """Return whether a microbatch passes all layers in order, and replicas of the first wait for each other at the end.

    Branches run in parallel; and replicas without gradients to reduce start the next step on their own.
    """
    return bool(tables.bytes.exchange[0, 1] > 0) and is_plain_chain(tables.graph)


def _all_work(space: Space, tables: Tables) -> float:
    """Return the seconds of all microbatches, divided over all ranks in proportion to their speed."""
    layers = {name: np.diff((kind.total - kind.accumulate)[0]) for name, kind in tables.seconds.items()}
    fastest = np.minimum.reduce(list(layers.values()))
    used = fastest > 0
    if not used.any():
        return 0.0
    rates = {name: float((fastest[used] / seconds[used]).max()) for name, seconds in layers.items()}
    speed = sum(rates[space.cluster.device_kind(rank).name] for rank in range(space.num_ranks))
    return float(tables.num_microbatches * fastest.sum() / speed)


def _slice(first: Floats, later: Floats, optimizer: Floats, before: Floats, num_microbatches: int, ranks: int) -> float:
    """Return the threshold in seconds below which the layers do not fit on the ranks."""
    high = float(num_microbatches * later[0, -1] + optimizer[0, -1])
    low = 0.0
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if _fewest_ranks(first, later, optimizer, before, num_microbatches, ranks, middle) <= ranks:
            high = middle
        else:
            low = middle
    return low


@compiled
def _fewest_ranks(
    first: Floats, later: Floats, optimizer: Floats, before: Floats, num_microbatches: int, ranks: int, theta: float
) -> int:
    """Return the number of ranks that hold all layers in stages within θ each; ``ranks`` + 1 or more if impossible."""
    num_layers = len(first)
    fewest = np.full(num_layers + 1, ranks + 1)
    fewest[0] = 0
    for i in range(num_layers):
        if fewest[i] >= ranks:
            continue
        for j in range(i + 1, num_layers + 1):
            own = theta - first[i, j] - max(optimizer[i, j], before[i])
            if own < 0.0:
                break
            # The first microbatch of a step takes less than the others.
            rounds = 1.0 + np.floor(own / later[i, j]) if later[i, j] > 0.0 else float(num_microbatches)
            replicas = max(int(np.ceil(num_microbatches / rounds)), 1)
            fewest[j] = min(fewest[j], fewest[i] + replicas)
    return int(fewest[num_layers])
