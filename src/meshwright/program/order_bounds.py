"""Lower bounds on the length of an order, for given stage times and memory limits.

A rank starts after the head H of its stages, when the first microbatch can reach one of them. No order is shorter than

    H + Σ (F + I + W)                             the rank computes all of this
    H + Σ (F + I) + the way back                  its last gradient has to travel to where the model begins
    H + Σ K τ / limit                             a byte of a microbatch is held for a round trip τ

for any rank. Heads, ways back and round trips go along the longest path between the ends of stages, with the fastest
replica of each, and without transfer time where both stages have a rank in common.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np

from meshwright.program.order_loops import NEEDS, Ints, OrderProblem

# Less than any sum of times: there is no path.
_NO_WAY = -(2**62)


class Bounds:
    """Lower bounds for every order of a problem. Shapes (stages,), picoseconds."""

    def __init__(self, problem: OrderProblem) -> None:
        self._problem, self._num_stages = problem, len(problem.kept)
        self._forward, self._inputs, self._weights = (
            np.minimum.reduceat(seconds[problem.replica_seats], problem.replica_offsets[:-1])
            for seconds in (problem.forward, problem.inputs, problem.weights)
        )

    @cached_property
    def length(self) -> int:
        """The lower bound of the length, as in the module's docstring."""
        problem = self._problem
        longest = 0
        for rank, (first, stop) in enumerate(pairwise(problem.seat_offsets)):
            seats = np.arange(first, stop)
            stages, count = problem.seat_stage[seats], problem.seat_count[seats]
            head = int(self._heads[stages].min())
            moving = int((count * (problem.forward + problem.inputs)[seats]).sum())
            work = moving + int((count * problem.weights[seats]).sum())
            trips = self.round_trips[stages]
            held = sum(int(n) * int(k) * int(t) for n, k, t in zip(count, problem.kept[stages], trips, strict=True))
            limit = int(problem.limit[rank])
            if len(seats) == 1 and (kept := int(problem.kept[stages[0]])):
                limit -= limit % kept
            back = int(self._ways_back[stages].min())
            longest = max(longest, head + work, head + moving + back, head + -(-held // max(limit, 1)))
        return longest

    @cached_property
    def round_trips(self) -> Ints:
        """Least time from the start of a stage's forward to the end of its part for weights."""
        return np.ascontiguousarray(np.diagonal(self._ways[self._num_stages :])) + self._weights

    @cached_property
    def _heads(self) -> Ints:
        """Earliest time at which a microbatch can reach each stage."""
        ends: Ints = self._ways[: self._num_stages].max(axis=1)
        return ends - self._forward

    @cached_property
    def _ways(self) -> Ints:
        """The longest path from the start of each stage's forward through each end, shape (ends, stages)."""
        num_stages, needs = self._num_stages, self._needs
        ways = np.full((2 * num_stages, num_stages), _NO_WAY, np.int64)
        for end in range(num_stages):
            for other, away in needs[end]:
                np.maximum(ways[end], ways[other] + away, out=ways[end])
            ways[end, end] = max(ways[end, end], 0)
            ways[end] += self._forward[end]
        for end in reversed(range(num_stages, 2 * num_stages)):
            ways[end] = ways[end - num_stages]
            for other, away in needs[end]:
                np.maximum(ways[end], ways[other + num_stages] + away, out=ways[end])
            ways[end] += self._inputs[end - num_stages]
        return ways

    @cached_property
    def _ways_back(self) -> Ints:
        """Least time from the end of a stage's part for inputs until everything that depends on it is done."""
        back = self._weights.copy()
        for stage in range(self._num_stages):
            for other, away in self._needs[self._num_stages + stage]:
                back[other] = max(back[other], away + self._inputs[stage] + back[stage])
        return back

    @cached_property
    def _needs(self) -> list[list[tuple[int, int]]]:
        """For each end, the stages that it needs and the least time of the transfer."""
        problem = self._problem
        seats = [problem.replica_seats[first:stop] for first, stop in pairwise(problem.replica_offsets)]
        ranks = [set(problem.seat_rank[own].tolist()) for own in seats]
        needs = [
            (int(other), int(away))
            for other, away in zip(problem.link_stage[NEEDS], problem.link_ps[NEEDS], strict=True)
        ]
        return [
            [(other, 0 if ranks[other] & ranks[end % self._num_stages] else away) for other, away in needs[first:stop]]
            for end, (first, stop) in enumerate(pairwise(problem.link_offsets[NEEDS]))
        ]
