"""A chain of L layers to cut into k stages, one device each, for B microbatches, and its exact solution.

    cost(e) = (B - 1) · max_s Σ layer_costs[e_s : e_s+1]  +  Σ_s cut_costs[e_s - 1, s - 1]

for edges 0 = e_0 < e_1 < … < e_k = L. The sum of all layers is the same for every cutting and is left out. What a cut
costs depends on where it is and on which of the k - 1 cuts it is: devices and links may be unequal.

Source: the notebook of pipeDejavu (explcre, 2023), ``pipe_dp``, which extends Alpa's
``playground/pipeline/auto_pipeline_slicing_dp.ipynb``. Its instances have B = 3; layers of 1 and cuts of 2
(homogeneous), or whole numbers from 5 to 9 for both (heterogeneous).

For a threshold θ on the stages, the least cost of the cuts is a dynamic program over cuts in order,

    sums[s, j] = min over i of  sums[s - 1, i] + cut_costs[i - 1, s - 2]      with the layers i:j within θ

whose term does not depend on j, so that the minimum over the window of i slides along with j in constant time: O(L k).
The program also tells the next θ at which a window grows. As in the planner's slicing, the best θ is found by halving
its range; a part is dropped when (B - 1) · its lowest θ + the cuts at its highest θ is not below the best one known.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.spec import PlanError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Cuttings whose costs differ by less than this share are equal: sums of some hundred doubles.
_RELATIVE_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainProblem:
    """What is to be cut: ``layer_costs`` (L,), ``cut_costs`` (L - 1, k - 1), finite and not negative.

    ``cut_costs[i, j]`` is that of the j-th cut if it lies behind layer i. Raises PlanError for shapes or values that
    mean nothing.
    """

    layer_costs: Floats
    cut_costs: Floats
    num_microbatches: int

    def __post_init__(self) -> None:
        layers, cuts = np.asarray(self.layer_costs, np.float64), np.asarray(self.cut_costs, np.float64)
        object.__setattr__(self, "layer_costs", layers)
        object.__setattr__(self, "cut_costs", cuts)
        if layers.ndim != 1 or cuts.ndim != 2 or not len(layers) or len(cuts) != len(layers) - 1:
            raise PlanError(
                f"Got layer costs of shape {layers.shape} and cut costs of shape {cuts.shape}; expected (L,) and "
                "(L - 1, k - 1) for L layers and k stages."
            )
        if cuts.shape[1] >= len(layers) > 1:
            raise PlanError(
                f"{len(layers)} layers cannot be cut into {cuts.shape[1] + 1} stages; ask for at most {len(layers)}."
            )
        if not all(np.isfinite(costs).all() and (costs >= 0).all() for costs in (layers, cuts)):
            raise PlanError("Costs of layers and cuts must be finite and not negative.")
        if self.num_microbatches < 1:
            raise PlanError(f"Got {self.num_microbatches} microbatches; a step has at least one.")

    @property
    def num_layers(self) -> int:
        """The layers, L."""
        return len(self.layer_costs)

    @property
    def num_stages(self) -> int:
        """The stages, k."""
        return int(self.cut_costs.shape[1]) + 1

    @property
    def rounds(self) -> int:
        """B - 1: how often the slowest stage counts."""
        return self.num_microbatches - 1

    def before(self) -> Floats:
        """The cost of all layers before each boundary 0..L, (L + 1,)."""
        return np.concatenate([[0.0], np.cumsum(self.layer_costs)])

    def cut_at(self, edges: Sequence[int]) -> Cutting:
        """The cutting with these edges 0 = e_0 < … < e_k = L. Raises PlanError if they are none."""
        if len(edges) != self.num_stages + 1 or edges[0] != 0 or edges[-1] != self.num_layers:
            raise PlanError(f"Edges {tuple(edges)} do not cut {self.num_layers} layers into {self.num_stages} stages.")
        if any(stop <= start for start, stop in pairwise(edges)):
            raise PlanError(f"Edges {tuple(edges)} leave a stage empty; they must ascend.")
        before = self.before()
        slowest = max(float(before[stop] - before[start]) for start, stop in pairwise(edges))
        cuts = sum(float(self.cut_costs[edge - 1, cut]) for cut, edge in enumerate(edges[1:-1]))
        return Cutting(edges=tuple(edges), cost=self.rounds * slowest + cuts, slowest=slowest)

    def cut_evenly(self) -> Cutting:
        """The notebook's ``uniform_split``: as many layers in each stage, the remainder in the last."""
        each = self.num_layers // self.num_stages
        return self.cut_at((*range(0, each * self.num_stages, each), self.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """Stages ``edges[s]:edges[s + 1]``, what they cost, and the compute of the slowest."""

    edges: tuple[int, ...]
    cost: float
    slowest: float


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
