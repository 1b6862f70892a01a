"""Hill climbing on the simulator: take the first small change that improves a plan, until no change or time is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.spec import Plan, StagePlan

Stages = tuple[StagePlan, ...]


def climb(start: RankedPlan, changes: Callable[[Plan], Iterable[Plan]], state: SearchState, *, most: int) -> Steps:
    """Propose the ``changes`` of the best plan so far, and move on to the first that is faster and fits.

    Stops if no change improves the plan, after ``most`` proposals, or when the time of the search is over. No plan is
    proposed twice.
    """
    best, improved = start, True
    tried = {start.plan}
    while improved:
        improved = False
        for plan in changes(best.plan):
            if len(tried) > most or state.seconds_left() <= 0:
                return
            if plan in tried:
                continue
            tried.add(plan)
            state.events.progress("change the best plan", len(tried) - 1, most)
            item = yield Proposal(plan)
            if item is not None and item.fits and item.aimed_s < best.aimed_s:
                best, improved = item, True
                break


def moved_boundaries(stages: Stages) -> Iterator[Stages]:
    """Yield the stages with one layer moved from a stage to its neighbour, as a chain without branches."""
    chain = as_chain(stages)
    for index in range(1, len(chain)):
        before, behind = chain[index - 1], chain[index]
        for cut in (behind.start - 1, behind.start + 1):
            if before.start < cut < behind.stop:
                pair = replace(before, stop=cut), replace(behind, start=cut)
                yield (*chain[: index - 1], *pair, *chain[index + 1 :])


def as_chain(stages: Stages) -> Stages:
    """Return the stages as a chain: without ``feeds``, which would be wrong once layers move."""
    return tuple(replace(stage, feeds=()) for stage in stages)
