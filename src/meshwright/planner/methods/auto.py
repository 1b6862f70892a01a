"""The default method (`auto`): run all methods that suit the problem, then improve the best plan by small changes.

Each method knows the best step so far. Condition of each, and what runs:

    many settings, or very many devices   `grid`: uniform plans; selects the settings that are searched in detail
    unequal devices                       `unequal`: stages mapped to devices, work in proportion to speed
    always                                `slicing`: exact, with lower bounds, under the selected settings
    asynchronous schedules                `pipedream`
    ops are split                         `alpa`, if HiGHS is installed
    no plan fits                          `grid` with states or activations in host memory, if the choices allow this as
                                          a last resort
    then                                  less recompute, as far as memory allows (`recompute_in_part`); changes of
                                          boundaries, microbatches, schedules and layouts on the simulator (`improve`)
    with a deadline, in the time left     `flexflow` (Markov chain) and `differentiable` (gradient descent)

With a deadline, each method gets a share of the remaining time. Without one, each ends after a number of simulations,
so that the result is deterministic. The search ends early if the best plan is within 0.1 % of the lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import ceil
from typing import NamedTuple

from meshwright.planner.climbing import as_chain, climb, moved_boundaries
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.left_out import unequal_settings
from meshwright.planner.methods.alpa.alpa_method import alpa
from meshwright.planner.methods.differentiable import differentiable
from meshwright.planner.methods.flexflow import flexflow
from meshwright.planner.methods.grid import grid
from meshwright.planner.methods.pipedream import pipedream
from meshwright.planner.methods.slicing import slicing
from meshwright.planner.methods.slicing.slicing_method import MAX_RANKS, adopt_whole
from meshwright.planner.methods.unequal import unequal
from meshwright.planner.methods.unequal.virtual_workers import are_equal
from meshwright.planner.problem import MAX_MICROBATCH_SIZES, Problem
from meshwright.planner.rank_layouts import Layout, LayoutName
from meshwright.planner.search_method import Method, Proposal, SearchState, Steps
from meshwright.spec import (
    Graph,
    MeshwrightError,
    Plan,
    PlanError,
    Recompute,
    StagePlan,
    format_percent,
    recompute_choices,
)
from meshwright.spec.recompute import RecomputeName
from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES

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


# In each stage, only as many blocks are recomputed in the heavier way as memory requires. A simulated plan may be
# faster than the best one but not fit, while the same plan with more recomputation fits and is slower. Between the two,
# the first n blocks of the stages on each rank are recomputed as in the heavier one and the others as in the lighter
# one. A rank's reserved memory falls almost linearly with n, and its time rises, so the least n that fits is searched
# between a number that is too small and one that suffices, for all ranks at once:
#
#     n  =  low + (high - low) · excess(low) / (excess(low) - excess(high))
#
# (Megatron-LM's --recompute-num-layers and torchtitan's layer-wise checkpointing are set by hand for the same purpose.)
def recompute_in_part(problem: Problem, state: SearchState) -> Steps:
    """Propose plans with as little recompute as memory allows.

    Each is a mixture of a fast plan that does not fit and the same plan with more recompute that fits.
    """
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
        """True if the least number of recomputed blocks that fits is known."""
        return self.high - self.low <= 1

    def next(self) -> int:
        """Return the number of recomputed blocks to try next, by linear interpolation of the memory excess."""
        if self.is_done:
            return self.high
        share = self._over_low / max(self._over_low - self._over_high, 1)
        return min(max(self.low + ceil((self.high - self.low) * share), self.low + 1), self.high - 1)

    def learn(self, tried: int, item: RankedPlan) -> None:
        """Narrow the range by the simulated plan with ``tried`` recomputed blocks."""
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


# If there are many settings, the number that the grid selects for a detailed search.
CLOSE_SETTINGS = 3
# Ops times microbatch sizes times settings that exact slicing processes in about ten seconds.
SMALL = 100_000
# The most simulations of the grid on unequal devices, of each way to offload, of exact slicing and of the final
# changes.
MOST_UNEQUAL, MOST_RESORTING, MOST_SLICINGS, CHANGES = 64, 32, 200, 120
# A plan within this share of the bound ends the search.
_CLOSE = 1e-3


class _Turn(NamedTuple):
    """A method, its share of the remaining time, and the most simulations that it may request (0: any number)."""

    method: Method
    share: float
    most: int = 0


def auto(problem: Problem, state: SearchState) -> Steps:
    """Run the methods that suit the problem, one after the other, and improve the best plan by small changes.

    Raises the first error of a method if no plan was found at all.
    """
    errors: list[MeshwrightError] = []
    is_wide = problem.is_wide
    has_grid = is_wide or any(setting.num_devices > MAX_RANKS for setting in problem.settings())
    if has_grid:
        # On unequal devices, uniform plans are far from the best, and so are their bounds.
        most = MOST_UNEQUAL if len(problem.choices.idle) > 1 else 0
        yield from _take_turn(_Turn(grid, 0.4, most), problem, state, errors)
    if has_grid and state.best is None and (yield from _resort(problem, state, errors)):
        problem = problem.resorting()
    near = problem if not is_wide or _is_small(problem) else _near(problem, state)
    if len(problem.choices.idle) > 1 or not all(map(are_equal, near.spaces())):
        settings = list(problem.settings())
        mapped = problem.under(unequal_settings(near.only or settings[:1], problem.choices)) if is_wide else near
        yield from _take_turn(_Turn(unequal, 0.5), mapped, state, errors)
        near = _near(problem, state) if is_wide else near
    yield from _take_turns(near, state, errors)
    # With few settings only the detailed search can show that nothing fits.
    if not has_grid and state.best is None and (yield from _resort(problem, state, errors)):
        problem = problem.resorting()
        yield from _take_turns(_near(problem, state), state, errors)
    # If plans were too large, memory binds, and the search reports that instead.
    if state.best is None and errors and not state.rejected:
        raise errors[0]
    if _is_proven(state):
        state.note(f"The best plan is within {format_percent(_CLOSE)} of the lower bound: no other plans were tried.")
    elif not state.is_over:
        yield from recompute_in_part(problem, state)
        yield from improve(problem, state)
        for turn in _late_turns(state):
            yield from _take_turn(turn, _near(problem, state), state, errors)


def _resort(
    problem: Problem, state: SearchState, errors: list[MeshwrightError]
) -> Generator[Proposal, RankedPlan | None, bool]:
    """Search plans that keep states or activations in host memory, each way by the grid; return whether any fits."""
    for away in problem.choices.last_resorts:
        # Parameters in host memory cost more than all other ways.
        if away.parameters == "device" or state.best is None:
            yield from _take_turn(_Turn(grid, 0.4, MOST_RESORTING), problem.resorting((away,)), state, errors)
    if state.best is not None:
        state.note("No plan fits into device memory alone, so the plans offload the named parts to host memory.")
    return state.best is not None


def _turns(problem: Problem) -> Iterator[_Turn]:
    chosen = problem.choices
    yield _Turn(slicing, 0.7, MOST_SLICINGS)
    if set(chosen.schedules) & set(ASYNCHRONOUS_SCHEDULES):
        yield _Turn(pipedream, 0.4)
    if any(setting.sharding.tensor > 1 for setting in problem.settings()) and _is_installed("highspy"):
        yield _Turn(alpa, 0.5)


def _take_turns(problem: Problem, state: SearchState, errors: list[MeshwrightError]) -> Steps:
    """Run the detailed methods one after the other, until the best plan is proven."""
    for turn in _turns(problem):
        # Bounds do not cover Alpa's own placements.
        if not state.is_over and (turn.method is alpa or not _is_proven(state)):
            yield from _take_turn(turn, problem, state, errors)


def _late_turns(state: SearchState) -> Iterator[_Turn]:
    """Yield methods that use any amount of time: with a deadline, they get the rest of it."""
    if state.stop_at < float("inf"):
        yield _Turn(flexflow, 0.5)
        if _is_installed("torch"):
            yield _Turn(differentiable, 1.0)


def _take_turn(turn: _Turn, problem: Problem, state: SearchState, errors: list[MeshwrightError]) -> Steps:
    """Run a method until its share of the time or its number of simulations is used up."""
    state.turn_ends_at = time.monotonic() + max(state.seconds_left(), 0.0) * turn.share
    steps = turn.method(problem, state)
    num_seen = 0
    try:
        proposal = next(steps)
        while not (turn.most and num_seen == turn.most):
            result = yield proposal
            num_seen += 1
            proposal = steps.send(result)
    except StopIteration:
        pass
    except MeshwrightError as error:
        errors.append(error)
    finally:
        steps.close()
        state.turn_ends_at = float("inf")


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def _is_small(problem: Problem) -> bool:
    """Return whether exact slicing of all settings takes a few seconds at most."""
    sizes = problem.choices.microbatch_sizes or range(MAX_MICROBATCH_SIZES)
    num_ops = len(problem.graph_for(min(problem.choices.microbatch_sizes, default=1)).ops)
    return num_ops * len(sizes) * len(list(problem.settings())) <= SMALL


def _near(problem: Problem, state: SearchState) -> Problem:
    """Return the problem under the settings of the best plans so far; if none fits, of those closest to fitting."""
    best = sorted(state.fitting, key=lambda item: item.step_time_s) or sorted(state.rejected, key=_excess)
    found = (problem.setting_of(item.plan) for item in best)
    settings = list(dict.fromkeys(setting for setting in found if setting is not None))
    return problem.under(settings[:CLOSE_SETTINGS]) if settings else problem


def _excess(item: RankedPlan) -> int:
    return item.excess_bytes


def _is_proven(state: SearchState) -> bool:
    return state.proven_s > 0 and state.best_s <= state.proven_s * (1 + _CLOSE)


def improve(problem: Problem, state: SearchState) -> Steps:
    """Improve the best plan by hill climbing on the simulator (`climb`); propose nothing if there is no plan yet."""
    if state.best is not None:
        yield from climb(state.best, partial(_changes, problem), state, most=CHANGES)


def _changes(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield plans that differ in a boundary, the microbatch size, the schedule or the layout of ranks."""
    if not plan.has_virtual_stages:
        yield from (replace(plan, stages=stages) for stages in moved_boundaries(plan.stages))
    for size in _other_sizes(problem, plan):
        count = problem.workload.global_batch // (size * plan.sharding.expert)
        with suppress(MeshwrightError):
            graph = problem.graph_for(size)
            yield replace(plan, num_microbatches=count, graph_hash=graph.content_hash, stages=_unshared(plan))
    # On one stage, all synchronous schedules are the same.
    for schedule in problem.choices.schedules if len(plan.stages) > 1 else ():
        if schedule != plan.schedule:
            for chunks in problem.choices.num_chunks:
                with suppress(MeshwrightError):
                    yield adopt_whole(problem, plan, schedule, chunks)
    yield from _other_layouts(plan)


def _unshared(plan: Plan) -> tuple[StagePlan, ...]:
    return tuple(replace(stage, shares=()) for stage in as_chain(plan.stages))


def _other_sizes(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Return the allowed microbatch sizes next to the plan's."""
    setting = problem.setting_of(plan)
    if setting is None:
        return ()
    with suppress(PlanError):
        sizes = problem.space(setting).microbatch_sizes
        if plan.microbatch_size in sizes:
            place = sizes.index(plan.microbatch_size)
            return (*sizes[max(place - 1, 0) : place], *sizes[place + 1 : place + 2])
    return ()


def _other_layouts(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with its equal replicas on other ranks."""
    replicas = {len(stage.ranks) for stage in plan.stages}
    if len(replicas) > 1 or len(plan.stages) == 1 or plan.has_virtual_stages:
        return
    names: tuple[LayoutName, ...] = ("stage-major", "replica-major", "reversed")
    take = replicas.pop()
    for name in names:
        layout = Layout(name=name, num_ranks=plan.num_ranks, num_stages=len(plan.stages))
        if name == "replica-major" and take == 1:
            continue
        places = enumerate(plan.stages)
        stages = tuple(replace(stage, ranks=layout.ranks(index * take, take), shares=()) for index, stage in places)
        if stages != plan.stages:
            yield replace(plan, stages=stages)
