"""The method: options (setting, microbatch size, schedule, number of stages) are sampled, each descended in turn.

The choice among shardings, sizes, schedules and numbers of stages is itself a softmax, over the best seconds that each
option has shown: options are drawn by Gumbel noise on it (so without replacement at first), which cools down. A draw
starts at random, descends, is rounded and repaired. If it is better than the option's best, it is proposed; a result
that needs more memory than the closed form estimated lowers the memory of the option, and its seconds correct the
estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.method import Proposal, SearchState, Steps
from meshwright.planner.methods.differentiable.layouts import (
    StageLayout,
    descend_logits,
    logits_of,
    round_logits,
    start_logits,
)
from meshwright.planner.methods.differentiable.relaxed import Smooth
from meshwright.planner.methods.differentiable.stage_arrays import StageSpace
from meshwright.planner.methods.differentiable.stages import make_stages
from meshwright.planner.problem import Problem
from meshwright.planner.space import Space
from meshwright.spec import Plan, StagePlan
from meshwright.spec.plan import BASIC_SCHEDULES

# Draws without a deadline; with one, draws continue until it passes.
NUM_DRAWS = 200
# Temperatures of the softmax over options: the relative difference of seconds that matters.
HOT, COLD = 0.3, 0.03
MAX_STAGES = 16
# The probability that a draw starts at the best of its option.
WARM = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class _Option:
    """One combination of the choices that are not relaxed, and its best layout."""

    space: Space
    size: int
    schedule: str
    num_stages: int
    stages: StageSpace
    smooth: Smooth
    best: StageLayout | None = None
    # The simulator's seconds over those of the closed form.
    ratio: float = 1.0
    seen: set[Plan] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        """Corrected seconds of its best layout by the closed form; infinite before there is one, or if nothing fits."""
        if self.best is None or self.best.excess > 0:
            return math.inf
        return self.best.seconds * self.ratio

    def draw(self, random: np.random.Generator, *, gradients: bool) -> StageLayout:
        """Descend from a random start or from the best, round and repair; keep the result if it is better."""
        # With one stage there is nothing to relax.
        if not gradients or self.num_stages == 1:
            found = round_logits(self.stages, start_logits(self.stages, self.num_stages, random))
        elif self.best is not None and random.random() < WARM:
            found = descend_logits(self.stages, self.smooth, logits_of(self.stages, self.best, random))
        else:
            found = descend_logits(self.stages, self.smooth, start_logits(self.stages, self.num_stages, random))
        if self.best is None or found.key < self.best.key:
            self.best = found
        return found

    def plan(self, layout: StageLayout) -> Plan:
        """Return the plan of the whole graph."""
        ranks = [tuple(map(int, np.flatnonzero(layout.stage_of == stage))) for stage in range(self.num_stages)]
        edges = [int(edge) for edge in layout.edges]
        stages = tuple(
            StagePlan(start=start, stop=stop, ranks=taken)
            for start, stop, taken in zip(edges[:-1], edges[1:], ranks, strict=True)
        )
        return self.space.make_whole(stages, self.size, self.schedule)

    def learn(self, layout: StageLayout, result: RankedPlan) -> None:
        """Correct the closed form of this option by a simulated result."""
        self.ratio = result.step_time_s / layout.seconds
        if not result.fits and result.excess_bytes > 0:
            rank = result.fullest_rank
            share = result.memory_limit_bytes[rank] / result.reserved_bytes[rank]
            self.stages = self.stages._replace(memory_limit=self.stages.memory_limit * share)
            self.smooth, self.best = Smooth(self.stages, self.num_stages), None


def differentiable(problem: Problem, state: SearchState) -> Steps:
    """Propose the plans that gradients find, best options first, until time is over or `NUM_DRAWS` are made."""
    return search_by_draws(problem, state, gradients=True)


def search_by_draws(problem: Problem, state: SearchState, *, gradients: bool) -> Steps:
    """Run the method; without ``gradients`` the same starts are only rounded and repaired (the control)."""
    options: list[_Option] = []
    for option in _options(problem):
        if options and state.seconds_left() <= 0:
            break
        option.draw(state.random, gradients=False)
        options.append(option)
    state.count(considered=len(options))
    for option in sorted(options, key=lambda option: option.seconds)[: state.max_plans]:
        if option.best is not None and option.best.excess <= 0:
            yield from _propose(option, option.best)
    for draw in range(NUM_DRAWS) if math.isinf(state.stop_at) else count():
        if not options or state.seconds_left() <= 0:
            return
        option = _choose(options, state.random, COLD + (HOT - COLD) / (1 + draw / len(options)))
        layout = option.draw(state.random, gradients=gradients)
        state.events.progress("descend", draw, NUM_DRAWS)
        state.count(considered=1)
        if layout.excess <= 0 and layout.seconds * option.ratio <= state.best_s * (1 + COLD):
            yield from _propose(option, layout)


def _propose(option: _Option, layout: StageLayout) -> Steps:
    """Propose a plan that its option has not proposed yet, and correct the option by the result."""
    plan = option.plan(layout)
    if plan in option.seen:
        return
    option.seen.add(plan)
    result = yield Proposal(plan, layout.seconds)
    if result is not None:
        option.learn(layout, result)


def _choose(options: list[_Option], random: np.random.Generator, temperature: float) -> _Option:
    """Return one option by a softmax over logarithms of seconds; those that fit nowhere last."""
    seconds = np.array([option.seconds for option in options])
    finite = np.isfinite(seconds)
    worst = seconds[finite].max() * 2 if finite.any() else 1.0
    logits = -np.log(np.where(finite, seconds, worst)) / temperature
    return options[int((logits + random.gumbel(size=len(options))).argmax())]


def _options(problem: Problem) -> Iterator[_Option]:
    """Yield all options, those of a setting together."""
    for space in problem.spaces():
        schedules = [name for name in space.schedules if name in BASIC_SCHEDULES] or ["1f1b"]
        for size in space.microbatch_sizes:
            for schedule in schedules[:1] if space.workload.kind == "inference" else schedules:
                stages = make_stages(space, size, schedule)
                most = min(space.num_ranks, stages.num_layers, MAX_STAGES)
                for num_stages in space.num_stages or range(1, most + 1):
                    if num_stages <= most and space.num_ranks <= num_stages * stages.num_microbatches:
                        yield _Option(
                            space=space,
                            size=size,
                            schedule=schedule,
                            num_stages=num_stages,
                            stages=stages,
                            smooth=Smooth(stages, num_stages),
                        )
