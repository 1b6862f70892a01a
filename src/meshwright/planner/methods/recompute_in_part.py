"""Reduce recomputation: in each stage, recompute only as many blocks in the heavier way as memory requires.

A simulated plan may be faster than the best one but not fit, while the same plan with more recomputation fits and is
slower. Between the two, the first n blocks of the stages on each rank are recomputed as in the heavier one and the
others as in the lighter one. A rank's reserved memory falls almost linearly with n, and its time rises, so the least n
that fits is searched between a number that is too small and one that suffices, for all ranks at once:

    n  =  low + (high - low) · excess(low) / (excess(low) - excess(high))

(Megatron-LM's --recompute-num-layers and torchtitan's layer-wise checkpointing are set by hand for the same purpose.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.method import Proposal, SearchState, Steps
from meshwright.planner.problem import Problem
from meshwright.spec import Graph, Plan
from meshwright.spec.recompute import Recompute
from meshwright.spec.recompute_words import RecomputeName, recompute_choices

# The most plans that get more recomputation until they fit, and the most fitting plans that get less; the fastest
# first.
MOST_PAIRS, MOST_LIGHTENED = 4, 2
# The most steps that narrow the numbers of one pair.
MOST_STEPS = 6
# The least expected gain of a plan, as a share of the step.
_LEAST_GAIN = 2e-3
# From light to heavy recomputation.
_BY_WEIGHT: tuple[RecomputeName, ...] = ("none", "op", "full")


class _Pair(NamedTuple):
    """A plan that does not fit, the same plan with more recomputation that does, and the step expected between them."""

    lighter: RankedPlan
    heavier: RankedPlan
    expected_s: float


def recompute_in_part(problem: Problem, state: SearchState) -> Steps:
    """Propose plans between fast plans that do not fit and slower ones that do."""
    allowed = [word for word in _BY_WEIGHT if word in problem.choices.recompute]
    if "none" not in allowed or len(allowed) == 1 or state.best is None:
        return
    weight = {str(word): place for place, word in enumerate(allowed)}
    pairs: list[_Pair] = []
    for item in _promising(state, allowed):
        if state.seconds_left() <= 0 or len(pairs) == MOST_PAIRS:
            break
        for word in allowed[weight[item.recompute] + 1 :]:
            heavier = yield _with_recompute(problem, item, word)
            if heavier is not None and heavier.fits:
                pairs.append(_pair(item, heavier))
                break
    for item in sorted(state.fitting, key=lambda item: item.step_time_s)[:MOST_LIGHTENED]:
        # The next lighter way may have been ruled out by bounds without a simulation.
        if item.recompute in allowed[1:] and state.seconds_left() > 0:
            lighter = yield _with_recompute(problem, item, allowed[weight[item.recompute] - 1])
            if lighter is not None and not lighter.fits:
                pairs.append(_pair(lighter, item))
    for pair in sorted(pairs, key=lambda pair: pair.expected_s):
        if state.seconds_left() > 0 and pair.expected_s < state.best_s * (1 - _LEAST_GAIN):
            yield from _narrow(problem, pair, state)


def _promising(state: SearchState, allowed: Sequence[str]) -> Iterator[RankedPlan]:
    """Yield plans that do not fit, would be the fastest, and may recompute more; the fastest first."""
    for item in sorted(state.rejected, key=lambda item: item.step_time_s):
        if item.step_time_s >= state.best_s * (1 - _LEAST_GAIN):
            return
        if item.recompute in allowed[:-1] and item.excess_bytes > 0:
            yield item


def _with_recompute(problem: Problem, item: RankedPlan, word: RecomputeName) -> Proposal:
    """Return the same plan with another recompute word."""
    again = recompute_choices(problem.graph_for(item.plan.microbatch_size))[word]
    return Proposal(replace(item.plan, recompute=again.ranges, keeps=again.keeps))


def _pair(lighter: RankedPlan, heavier: RankedPlan) -> _Pair:
    """Return both plans with the step expected between them, if memory and time of all blocks were equal."""
    share = lighter.excess_bytes / max(lighter.excess_bytes - heavier.excess_bytes, 1)
    return _Pair(lighter, heavier, lighter.step_time_s + share * (heavier.step_time_s - lighter.step_time_s))


class _Group:
    """The stages on the same ranks: their blocks, and a number of blocks that is too small and one that suffices."""

    def __init__(self, plan: Plan, ranks: tuple[int, ...], blocks: Sequence[int], pair: _Pair) -> None:
        self.ranks = ranks
        mine = [layer for stage in plan.stages if stage.ranks == ranks for layer in range(stage.start, stage.stop)]
        self.blocks = [layer for layer in mine if layer in blocks]
        self.low, self.high = 0, len(self.blocks)
        self._over_low, self._over_high = self._excess(pair.lighter), self._excess(pair.heavier)
        if self._over_low <= 0:
            self.high = 0

    def _excess(self, item: RankedPlan) -> int:
        return max(item.reserved_bytes[rank] - item.memory_limit_bytes[rank] for rank in self.ranks)

    @property
    def is_done(self) -> bool:
        """Whether the least number that fits is known."""
        return self.high - self.low <= 1

    def next(self) -> int:
        """Return the number to try: where the line between both ends meets the limit."""
        if self.is_done:
            return self.high
        share = self._over_low / max(self._over_low - self._over_high, 1)
        return min(max(self.low + ceil((self.high - self.low) * share), self.low + 1), self.high - 1)

    def learn(self, tried: int, item: RankedPlan) -> None:
        """Move an end to the number that was tried."""
        excess = self._excess(item)
        if self.is_done:
            return
        if excess > 0:
            self.low, self._over_low = tried, excess
        else:
            self.high, self._over_high = tried, excess


def _narrow(problem: Problem, pair: _Pair, state: SearchState) -> Steps:
    """Propose mixtures until the least number of heavier blocks is known for all ranks."""
    plan, graph = pair.lighter.plan, problem.graph_for(pair.lighter.plan.microbatch_size)
    light, heavy = (Recompute(item.plan.recompute, item.plan.keeps) for item in (pair.lighter, pair.heavier))
    starts = {start for start, _ in heavy.ranges}
    blocks = [index for index, layer in enumerate(graph.layers) if layer.start in starts]
    ranks = dict.fromkeys(stage.ranks for stage in plan.stages)
    groups = [_Group(plan, own, blocks, pair) for own in ranks]
    for _ in range(MOST_STEPS):
        if all(group.is_done for group in groups) or state.seconds_left() <= 0:
            return
        numbers = [group.next() for group in groups]
        chosen = {layer for group, count in zip(groups, numbers, strict=True) for layer in group.blocks[:count]}
        item = yield Proposal(_mixed(plan, graph, light, heavy, chosen))
        if item is None:
            return
        for group, count in zip(groups, numbers, strict=True):
            group.learn(count, item)


def _mixed(plan: Plan, graph: Graph, light: Recompute, heavy: Recompute, layers: Set[int]) -> Plan:
    """Return the plan with these layers recomputed in the heavier way, and all others in the lighter one."""
    ops = {op for layer in layers for op in range(graph.layers[layer].start, graph.layers[layer].stop)}
    ranges = (*(r for r in light.ranges if r[0] not in ops), *(r for r in heavy.ranges if r[0] in ops))
    keeps = (*(op for op in light.keeps if op not in ops), *(op for op in heavy.keeps if op in ops))
    return replace(plan, recompute=tuple(sorted(ranges)), keeps=tuple(sorted(keeps)))
