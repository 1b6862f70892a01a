"""Seconds and memory of given stages by the closed form of `stage_arrays` (`layout_cost`), and repair of such stages.

Stages are given by ``edges``, shape (S + 1,): the layer at which each stage begins, then the number of layers; and by
``stage_of``, shape (D,): the stage of each rank. Repair makes the best single move of each boundary and every swap of
two ranks that improves the stages, until no change improves them. Less excess of memory comes first, then fewer
seconds. Repair uses no dynamic program.
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.methods.differentiable.stage_arrays import Floats, Integers, StageSpace

# A move must gain more than this share; less is rounding.
_TOLERANCE = 1e-9


def repair_layout(space: StageSpace, edges: Integers, stage_of: Integers) -> tuple[float, float]:
    """Improve ``edges`` and ``stage_of`` in place by single moves of a boundary and swaps of two ranks.

    It ends when no such change helps. Return the seconds per step and the excess of memory, as `layout_cost` does.
    """
    seconds, excess = _repair(space, edges, stage_of)
    return float(seconds), float(excess)


def round_edges(edges: Floats | Integers, num_layers: int) -> Integers:
    """Return the edges rounded to whole layers, ascending from 0 to ``num_layers`` with a layer in every stage."""
    num_stages = len(edges) - 1
    stage = np.arange(num_stages + 1)
    rounded = np.rint(np.asarray(edges, np.float64)).astype(np.int64) - stage
    # Less the stages before it, an edge need not be larger than the one before it, only not smaller.
    rounded = np.maximum.accumulate(np.clip(rounded, 0, num_layers - num_stages))
    rounded[0], rounded[-1] = 0, num_layers - num_stages
    whole: Integers = rounded + stage
    return whole


@compiled
def _repair(space: StageSpace, edges: Integers, stage_of: Integers) -> tuple[float, float]:
    best = layout_cost(space, edges, stage_of)
    moved = True
    while moved:
        moved = False
        for cut in range(1, len(edges) - 1):
            at = edges[cut]
            for place in range(edges[cut - 1] + 1, edges[cut + 1]):
                before, edges[cut] = edges[cut], place
                found = layout_cost(space, edges, stage_of)
                if _gains(found, best):
                    best, at, moved = found, place, True
                edges[cut] = before
            edges[cut] = at
        for one in range(len(stage_of)):
            for other in range(one):
                mine, theirs = stage_of[one], stage_of[other]
                if mine == theirs:
                    continue
                stage_of[one], stage_of[other] = theirs, mine
                found = layout_cost(space, edges, stage_of)
                if _gains(found, best):
                    best, moved = found, True
                else:
                    stage_of[one], stage_of[other] = mine, theirs
    return best


@compiled
def _gains(found: tuple[float, float], best: tuple[float, float]) -> bool:
    if abs(found[1] - best[1]) > _TOLERANCE:
        return bool(found[1] < best[1])
    return bool(found[0] < best[0] * (1 - _TOLERANCE))


@compiled
def layout_cost(space: StageSpace, edges: Integers, stage_of: Integers) -> tuple[float, float]:
    """Return the seconds per step and the excess of memory of stages, given as described in the module.

    The excess is the memory beyond the limit as a share of the limit, summed over ranks; 0 if all stages fit. Both are
    infinite if a stage has no rank or more ranks than microbatches.
    """
    num_stages, num_ranks = len(edges) - 1, len(stage_of)
    count, nodes = np.zeros(num_stages, np.int64), np.zeros((num_stages, space.group_factor.shape[1] - 1), np.int64)
    for rank in range(num_ranks):
        count[stage_of[rank]] += 1
        nodes[stage_of[rank], space.node_of[rank]] = 1
    total, bottleneck, excess, behind = 0.0, 0.0, 0.0, num_ranks
    for stage in range(num_stages):
        i, j, r = edges[stage], edges[stage + 1], count[stage]
        if r == 0 or r > space.num_microbatches:
            return np.inf, np.inf
        rounds = (space.num_microbatches + r - 1) // r
        in_flight = rounds if space.keeps_all else min(rounds, (behind + r - 1) // r)
        if space.num_fills == 0:
            in_flight = 1
        num_bytes = space.held_bytes[r, i, j] + (in_flight - 1) * space.more_bytes[r, i, j]
        seconds, backward, optimizer, transfer, per_byte = 0.0, np.inf, 0.0, 0.0, 0.0
        for rank in range(num_ranks):
            if stage_of[rank] != stage:
                continue
            kind = space.kind_of[rank]
            seconds = max(seconds, space.seconds[kind, i, j])
            backward = min(backward, space.backward_s[kind, i, j])
            optimizer = max(optimizer, space.optimizer_s[kind, i, j])
            excess += max(num_bytes / space.memory_limit[rank] - 1.0, 0.0)
            for other in range(num_ranks):
                if stage_of[other] == stage - 1:
                    transfer = max(transfer, space.transfer_s[space.link_of[other, rank], i])
                elif stage_of[other] == stage:
                    per_byte = max(per_byte, space.pair_s[other, rank])
        exchange = space.exchange_bytes[i, j] * per_byte * space.group_factor[r, nodes[stage].sum()]
        if space.overlap:
            exchange = max(exchange - backward, 0.0)
        total += space.num_fills * (seconds + transfer)
        bottleneck = max(bottleneck, (rounds - space.num_fills) * max(seconds, transfer) + exchange + optimizer)
        behind -= r
    return total + bottleneck, excess
