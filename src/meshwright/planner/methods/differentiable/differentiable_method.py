"""The differentiable method: draw an option, and find its stages by gradient descent.

An option is a setting, microbatch size, schedule and number of stages. Options are drawn from a softmax over the best
seconds that each has reached, by Gumbel noise whose temperature falls. A draw starts at random (`start_logits`) or near
the option's best layout, descends (`descend_logits`), is rounded and repaired (`round_logits`). If its estimate is
close to the best step or better, the plan is proposed. The simulated result corrects the option: its seconds scale the
estimate, and if the plan does not fit, the option's memory limit is lowered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.methods.differentiable.relaxed import (
    Logits,
    Smooth,
    anneal,
    descend,
    make_stages,
)
from meshwright.planner.methods.differentiable.stage_arrays import Floats, Integers, StageSpace
from meshwright.planner.methods.differentiable.stage_repair import repair_layout, round_edges
from meshwright.planner.problem import Problem
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.planner.space import Space
from meshwright.spec import Plan, StagePlan
from meshwright.spec.schedules import BASIC_SCHEDULES

NUM_STEPS, RATE, LOOK = 30, 0.2, 5
# Temperatures of shares and of maxima, and the penalty for missing memory relative to a mean step.
LAYOUT_HOT, LAYOUT_COLD = 1.0, 0.2
SMOOTH, SHARP = 0.2, 0.02
CHEAP, DEAR = 1.0, 30.0
# Logits of a start: for the initial stage of a rank, for edges one mean stage away from a boundary's initial edge, and
# noise.
LEANING, NEAR, NOISE = 2.0, 4.0, 0.3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLayout:
    """Stages of layers on ranks, with their closed-form step time.

    ``edges`` (S + 1,): the first layer of each stage, and the number of layers. ``stage_of`` (D,): the stage of each
    rank. ``seconds``: the closed form of the step time. ``excess``: memory beyond the limit as a share of the limit,
    summed over ranks; 0 if the layout fits.
    """

    edges: Integers
    stage_of: Integers
    seconds: float
    excess: float

    @property
    def key(self) -> tuple[float, float]:
        """Sort key (excess, seconds): the least excess of memory first, then the fastest."""
        return self.excess, self.seconds


def start_logits(space: StageSpace, num_stages: int, random: np.random.Generator) -> Logits:
    """Return random logits to start from, for ``num_stages`` stages.

    Ranks are assigned in random order of node and device kind; boundaries give each stage work in proportion to its
    speed. Half of the starts give all stages the same number of ranks, the other half random numbers.
    """
    speeds = 1 / space.seconds[space.kind_of, 0, -1]
    groups = space.node_of * len(space.seconds) + space.kind_of
    order = np.lexsort((np.arange(space.num_ranks), random.permutation(groups.max() + 1)[groups]))
    stage_of = np.empty(space.num_ranks, np.int64)
    stage_of[order] = np.arange(space.num_ranks) * num_stages // space.num_ranks
    if random.random() < 0.5:
        firsts = 1 + random.choice(space.num_ranks - 1, num_stages - 1, replace=False)
        stage_of[order] = np.searchsorted(np.sort(firsts), np.arange(space.num_ranks), side="right")
    ranks = LEANING * np.eye(num_stages)[stage_of]
    powers = np.bincount(stage_of, weights=speeds, minlength=num_stages).cumsum()
    layers = space.seconds.mean(axis=0)[0, 1:-1] / space.seconds.mean(axis=0)[0, -1]
    edges = -NEAR * (num_stages * (layers - (powers / powers[-1])[:-1, None])) ** 2
    return Logits(edges + NOISE * random.normal(size=edges.shape), ranks + NOISE * random.normal(size=ranks.shape))


def logits_of(space: StageSpace, layout: StageLayout, random: np.random.Generator) -> Logits:
    """Return logits whose most likely layout is close to ``layout``, with random noise."""
    num_stages = len(layout.edges) - 1
    layers = np.arange(1, space.num_layers)
    edges = -NEAR * (num_stages / space.num_layers * (layers - layout.edges[1:-1, None])) ** 2
    ranks = LEANING * np.eye(num_stages)[layout.stage_of]
    return Logits(edges + NOISE * random.normal(size=edges.shape), ranks + NOISE * random.normal(size=ranks.shape))


def descend_logits(space: StageSpace, smooth: Smooth, start: Logits) -> StageLayout:
    """Descend from ``start`` with falling temperatures; return the best rounded and repaired layout on the way."""
    steps, found = count(), [round_logits(space, start)]

    def gradient_at(flat: Floats, progress: float) -> Floats:
        logits = start.like(flat)
        if next(steps) % LOOK == LOOK - 1:
            found.append(round_logits(space, logits))
        heat, sharp = anneal(LAYOUT_HOT, LAYOUT_COLD, progress), anneal(SMOOTH, SHARP, progress)
        _, gradient = smooth.gradient(logits, heat, sharp, anneal(CHEAP, DEAR, progress))
        return gradient.flat() / smooth.step_s

    end = descend(gradient_at, start.flat(), NUM_STEPS, RATE)
    return min([*found, round_logits(space, start.like(end))], key=lambda layout: layout.key)


def round_logits(space: StageSpace, logits: Logits) -> StageLayout:
    """Return the most likely layout of the logits, made valid (`valid_layout`) and repaired (`repair_layout`)."""
    edges, stage_of = valid_layout(space, logits)
    seconds, excess = repair_layout(space, edges, stage_of)
    return StageLayout(edges=edges, stage_of=stage_of, seconds=seconds, excess=excess)


def valid_layout(space: StageSpace, logits: Logits) -> tuple[Integers, Integers]:
    """Return the most likely edges and the stage of each rank, with at least one layer and one rank per stage."""
    num_stages = logits.ranks.shape[1]
    places = np.array([0, *(1 + int(row.argmax()) for row in logits.edges), space.num_layers])
    edges, stage_of = round_edges(places, space.num_layers), logits.ranks.argmax(axis=1)
    for stage in range(num_stages):
        if not (stage_of == stage).any():
            # The rank with the highest logit for it, among those whose stage has another rank.
            spare = np.bincount(stage_of, minlength=num_stages)[stage_of] > 1
            stage_of[np.where(spare, logits.ranks[:, stage], -np.inf).argmax()] = stage
    return edges, stage_of


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
        """Closed-form seconds of the best layout, corrected by simulations; infinite if no layout fits (yet)."""
        if self.best is None or self.best.excess > 0:
            return math.inf
        return self.best.seconds * self.ratio

    def draw(self, random: np.random.Generator, *, gradients: bool) -> StageLayout:
        """Return a layout found from a random start or near the best layout; remember it if it is the best so far."""
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
        """Return the plan of the whole graph for a layout."""
        ranks = [tuple(map(int, np.flatnonzero(layout.stage_of == stage))) for stage in range(self.num_stages)]
        edges = [int(edge) for edge in layout.edges]
        stages = tuple(
            StagePlan(start=start, stop=stop, ranks=taken)
            for start, stop, taken in zip(edges[:-1], edges[1:], ranks, strict=True)
        )
        return self.space.make_whole(stages, self.size, self.schedule)

    def learn(self, layout: StageLayout, result: RankedPlan) -> None:
        """Correct the estimate of this option by the simulated ``result`` of a layout.

        If the plan does not fit, also lower the option's memory limit and forget its best layout.
        """
        self.ratio = result.step_time_s / layout.seconds
        if not result.fits and result.excess_bytes > 0:
            rank = result.fullest_rank
            share = result.memory_limit_bytes[rank] / result.reserved_bytes[rank]
            self.stages = self.stages._replace(memory_limit=self.stages.memory_limit * share)
            self.smooth, self.best = Smooth(self.stages, self.num_stages), None


def differentiable(problem: Problem, state: SearchState) -> Steps:
    """Propose the plans that gradient descent finds, best options first.

    Stops at the deadline; without one, after `NUM_DRAWS` draws.
    """
    return search_by_draws(problem, state, gradients=True)


def search_by_draws(problem: Problem, state: SearchState, *, gradients: bool) -> Steps:
    """Run the differentiable method.

    Without ``gradients``, the same random starts are only rounded and repaired: the control of the benchmark.
    """
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
