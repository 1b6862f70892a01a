"""The cheapest cutting of a chain, exactly.

For a threshold θ on the stages, the least cost of the cuts is a dynamic program over cuts in order,

    sums[s, j] = min over i of  sums[s - 1, i] + cut_costs[i - 1, s - 2]      with the layers i:j within θ

whose term does not depend on j, so that the minimum over the window of i slides along with j in constant time: O(L k).
The program also tells the next θ at which a window grows. As in `planner.slicing`, the best θ is found by halving its
range; a part is dropped when (B - 1) · its lowest θ + the cuts at its highest θ is not below the best cutting known.
"""

from __future__ import annotations

import heapq

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.methods.chain.problem import ChainProblem, Cutting, Floats, Integers

# Cuttings whose costs differ by less than this share are equal: sums of some hundred doubles.
_RELATIVE_TOLERANCE = 1e-12


def solve_chain(problem: ChainProblem) -> Cutting:
    """A cutting that no other is cheaper than, up to rounding; the same for the same problem."""
    before, shape = problem.before(), (problem.num_stages + 1, problem.num_layers + 1)
    sums, starts = np.empty(shape), np.empty(shape, np.int64)
    rounds, best, best_cost = problem.rounds, np.empty(problem.num_stages + 1, np.int64), np.inf
    # Parts of the range of θ yet to be looked at: (bound, lowest θ, highest θ, cuts at the highest θ).
    parts: list[tuple[float, float, float, float]] = []

    def consider(theta: float, lowest: float) -> float:
        """Run one dynamic program; returns the lowest θ above ``theta`` that could matter."""
        nonlocal best, best_cost
        above = _fill(before, problem.cut_costs, theta, sums, starts)
        cuts = float(sums[-1, -1])
        if np.isfinite(cuts):
            edges, slowest = _read_edges(before, starts)
            if rounds * slowest + cuts < best_cost:
                best, best_cost = edges, rounds * slowest + cuts
            if lowest < slowest:
                heapq.heappush(parts, (rounds * lowest + cuts, lowest, slowest, cuts))
        return above

    consider(np.inf, max(float(problem.layer_costs.max()), before[-1] / problem.num_stages))
    while parts:
        bound, lowest, highest, cuts = heapq.heappop(parts)
        if bound >= best_cost * (1 - _RELATIVE_TOLERANCE):
            break
        middle = min(lowest + (highest - lowest) / 2, (best_cost - cuts) / rounds)
        above = consider(middle, lowest)
        if above < highest:
            heapq.heappush(parts, (rounds * above + cuts, above, highest, cuts))
    return problem.cut_at([int(edge) for edge in best])


@compiled
def _fill(before: Floats, cut_costs: Floats, theta: float, sums: Floats, starts: Integers) -> float:
    """Fill ``sums`` and ``starts`` (k + 1, L + 1) for a threshold; returns the least sum of layers above it."""
    num_stages, num_layers = sums.shape[0] - 1, sums.shape[1] - 1
    first = np.empty(num_layers + 1, np.int64)
    above, start = np.inf, 0
    for stop in range(1, num_layers + 1):
        while before[stop] - before[start] > theta:
            start += 1
        first[stop] = start
        if start > 0:
            above = min(above, before[stop] - before[start - 1])
    sums.fill(np.inf)
    sums[0, 0] = 0.0
    value = np.empty(num_layers + 1)
    queue = np.empty(num_layers + 1, np.int64)
    for stage in range(1, num_stages + 1):
        # Starts of this stage from the cheapest on; each is dearer and later than the one before it.
        head, tail = 0, 0
        for stop in range(stage, num_layers - num_stages + stage + 1):
            start = stop - 1
            value[start] = sums[stage - 1, start] + (cut_costs[start - 1, stage - 2] if stage > 1 else 0.0)
            while tail > head and value[queue[tail - 1]] > value[start]:
                tail -= 1
            queue[tail] = start
            tail += 1
            while head < tail and queue[head] < first[stop]:
                head += 1
            if head < tail:
                sums[stage, stop] = value[queue[head]]
                starts[stage, stop] = queue[head]
    return above


@compiled
def _read_edges(before: Floats, starts: Integers) -> tuple[Integers, float]:
    """The edges that filled tables hold, and the slowest stage."""
    num_stages, stop, slowest = starts.shape[0] - 1, starts.shape[1] - 1, 0.0
    edges = np.empty(num_stages + 1, np.int64)
    edges[num_stages] = stop
    for stage in range(num_stages, 0, -1):
        start = starts[stage, stop]
        slowest = max(slowest, before[stop] - before[start])
        edges[stage - 1] = stop = start
    return edges, slowest
