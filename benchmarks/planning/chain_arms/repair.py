"""From real numbers to a cutting: rounding, and repair that moves one boundary at a time.

Repair is a descent: while some boundary has a better place between its two neighbours, it moves there; among places of
equal cost, to the one with the smaller sum of squares of its two stages, so that a slowest stage can shrink step by
step if several are equally slow. It uses no dynamic program: it cannot find what the relaxation missed beyond the reach
of single moves.
"""

from __future__ import annotations

import numpy as np
from planning.chain import ChainProblem, Floats, Integers

from meshwright.compiled import compiled
from meshwright.planner.methods.differentiable.stage_repair import round_edges

# A move must gain more than this share of the cost; less is rounding.
_TOLERANCE = 1e-12


class Repaired:
    """The best repaired result of all starts of one variant, initially the even cutting, and their number."""

    def __init__(self, problem: ChainProblem) -> None:
        self.best = problem.cut_evenly()
        self.count = 0
        self._problem = problem
        self._before = problem.before()

    def keep(self, edges: Floats | Integers) -> None:
        """Round ``edges`` (k + 1,), repair them by single moves of boundaries, and keep them if they are better."""
        rounded = round_edges(edges, self._problem.num_layers)
        descend_moves(self._before, self._problem.cut_costs, float(self._problem.rounds), rounded)
        cutting = self._problem.cut_at([int(edge) for edge in rounded])
        self.count += 1
        if cutting.cost < self.best.cost:
            self.best = cutting


@compiled
def descend_moves(before: Floats, cut_costs: Floats, rounds: float, edges: Integers) -> None:
    """Move boundaries in place until no boundary has a better place."""
    num_stages = len(edges) - 1
    stages = np.empty(num_stages)
    for stage in range(num_stages):
        stages[stage] = before[edges[stage + 1]] - before[edges[stage]]
    moved = True
    while moved:
        moved = False
        for cut in range(1, num_stages):
            others = 0.0
            for stage in range(num_stages):
                if stage != cut - 1 and stage != cut:
                    others = max(others, stages[stage])
            first, last = before[edges[cut - 1]], before[edges[cut + 1]]
            best, least, squares = edges[cut], np.inf, np.inf
            # The current place comes first: any other must gain.
            for step in range(edges[cut + 1] - edges[cut - 1]):
                place = edges[cut - 1] + step if step else edges[cut]
                left, right = before[place] - first, last - before[place]
                cost = rounds * max(others, left, right) + cut_costs[place - 1, cut - 1]
                square = left * left + right * right
                slack = _TOLERANCE * cost
                if cost < least - slack or (cost <= least + slack and square < squares * (1 - _TOLERANCE)):
                    best, least, squares = place, cost, square
            if best != edges[cut]:
                edges[cut] = best
                stages[cut - 1], stages[cut] = before[best] - first, last - before[best]
                moved = True
