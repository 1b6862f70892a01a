"""The portfolio: methods that fit the problem one after the other, each told what the others found; then small changes.

    many settings        the uniform grid, which says which settings are worth a closer look; and very many devices
    unequal devices      mappings of stages to devices, shares by speed
    those settings       exact slicing, with bounds and the best step known so far
    endless schedules    PipeDream
    split ops            Alpa, where HiGHS is installed
    nothing fits         the grid again with states or activations on the hosts, where the choices leave that as a last
                         resort
    then                 less recompute, as far as memory allows (`recompute_in_part`), and changes of the best plan on
                         the simulator: boundaries, microbatches, schedules, layouts
    time is left         with a deadline, FlexFlow's chain and the descent by gradients

With a deadline each method has a share of the time that is left; without one, numbers of simulations end each of them,
so that the same problem has the same answer. The search ends early where the best plan is about as fast as the bound.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from meshwright.planner.climbing import as_chain, climb, moved_boundaries
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.layouts import Layout, LayoutName
from meshwright.planner.left_out import unequal_settings
from meshwright.planner.method import Method, Proposal, SearchState, Steps
from meshwright.planner.methods.alpa.method import alpa
from meshwright.planner.methods.differentiable import differentiable
from meshwright.planner.methods.flexflow import flexflow
from meshwright.planner.methods.grid import grid
from meshwright.planner.methods.pipedream import pipedream
from meshwright.planner.methods.recompute_in_part import recompute_in_part
from meshwright.planner.methods.slicing import slicing
from meshwright.planner.methods.slicing.method import MAX_RANKS, adopt_whole
from meshwright.planner.methods.unequal import unequal
from meshwright.planner.methods.unequal.assemble import are_equal
from meshwright.planner.microbatches import MAX_MICROBATCH_SIZES
from meshwright.planner.problem import Problem
from meshwright.spec import MeshwrightError, Plan, PlanError, StagePlan, format_percent
from meshwright.spec.plan import ASYNCHRONOUS_SCHEDULES

# Of many settings, which the grid tells apart, so many are looked at closely.
CLOSE_SETTINGS = 3
# Ops times microbatch sizes times settings that exact slicing goes through in about ten seconds.
SMALL = 100_000
# Simulations that the grid on unequal devices, each way to offload, exact slicing and the changes at the end may take.
MOST_UNEQUAL, MOST_RESORTING, MOST_SLICINGS, CHANGES = 64, 32, 200, 120
# Within this share of the bound there is nothing left to find.
_CLOSE = 1e-3


class _Turn(NamedTuple):
    """A method, its share of the time that is left, and how many simulations it may ask for (0: any number)."""

    method: Method
    share: float
    most: int = 0


def auto(problem: Problem, state: SearchState) -> Steps:
    """Run what fits the problem, one method after the other, and improve the best plan by small changes."""
    errors: list[MeshwrightError] = []
    is_wide = problem.is_wide
    has_grid = is_wide or any(setting.num_devices > MAX_RANKS for setting in problem.settings())
    if has_grid:
        # Uniform plans are far from the best on unequal devices, and their bounds far from them.
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
    # Of few settings it takes a closer look to say that none fits.
    if not has_grid and state.best is None and (yield from _resort(problem, state, errors)):
        problem = problem.resorting()
        yield from _take_turns(_near(problem, state), state, errors)
    # Where plans were too large, it is memory that binds.
    if state.best is None and errors and not state.rejected:
        raise errors[0]
    if _is_proven(state):
        state.note(f"The best plan is within {format_percent(_CLOSE)} of the lower bound: nothing else was tried.")
    elif not state.is_over:
        yield from recompute_in_part(problem, state)
        yield from improve(problem, state)
        for turn in _late_turns(state):
            yield from _take_turn(turn, _near(problem, state), state, errors)


def _resort(
    problem: Problem, state: SearchState, errors: list[MeshwrightError]
) -> Generator[Proposal, RankedPlan | None, bool]:
    """Search what keeps states or activations on the hosts, each way by the grid; says whether any fits."""
    for away in problem.choices.last_resorts:
        # Parameters on the host cost more than all else.
        if away.parameters == "device" or state.best is None:
            yield from _take_turn(_Turn(grid, 0.4, MOST_RESORTING), problem.resorting((away,)), state, errors)
    if state.best is not None:
        state.note("Nothing fits the devices alone: what is named is kept on the hosts.")
    return state.best is not None


def _turns(problem: Problem) -> Iterator[_Turn]:
    chosen = problem.choices
    yield _Turn(slicing, 0.7, MOST_SLICINGS)
    if set(chosen.schedules) & set(ASYNCHRONOUS_SCHEDULES):
        yield _Turn(pipedream, 0.4)
    if any(setting.sharding.tensor > 1 for setting in problem.settings()) and _is_installed("highspy"):
        yield _Turn(alpa, 0.5)


def _take_turns(problem: Problem, state: SearchState, errors: list[MeshwrightError]) -> Steps:
    """Let the methods that look closely propose one after the other, until the best plan is proven."""
    for turn in _turns(problem):
        # Bounds know nothing of placements of Alpa's own.
        if not state.is_over and (turn.method is alpa or not _is_proven(state)):
            yield from _take_turn(turn, problem, state, errors)


def _late_turns(state: SearchState) -> Iterator[_Turn]:
    """Methods that go on as long as there is time: where it is limited, what is left of it is theirs."""
    if state.stop_at < float("inf"):
        yield _Turn(flexflow, 0.5)
        if _is_installed("torch"):
            yield _Turn(differentiable, 1.0)


def _take_turn(turn: _Turn, problem: Problem, state: SearchState, errors: list[MeshwrightError]) -> Steps:
    """Let a method propose until its share of the time or its number of simulations is over."""
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
    """Whether exact slicing of all settings takes a few seconds at most."""
    sizes = problem.choices.microbatch_sizes or range(MAX_MICROBATCH_SIZES)
    num_ops = len(problem.graph_for(min(problem.choices.microbatch_sizes, default=1)).ops)
    return num_ops * len(sizes) * len(list(problem.settings())) <= SMALL


def _near(problem: Problem, state: SearchState) -> Problem:
    """The problem under the settings of the best plans so far; before any fits, of those that exceed memory least."""
    best = sorted(state.fitting, key=lambda item: item.step_time_s) or sorted(state.rejected, key=_excess)
    found = (problem.setting_of(item.plan) for item in best)
    settings = list(dict.fromkeys(setting for setting in found if setting is not None))
    return problem.under(settings[:CLOSE_SETTINGS]) if settings else problem


def _excess(item: RankedPlan) -> int:
    return item.excess_bytes


def _is_proven(state: SearchState) -> bool:
    return state.proven_s > 0 and state.best_s <= state.proven_s * (1 + _CLOSE)


def improve(problem: Problem, state: SearchState) -> Steps:
    """Climb from the best plan, if there is one."""
    if state.best is not None:
        yield from climb(state.best, partial(_changes, problem), state, most=CHANGES)


def _changes(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Plans that differ from one by a boundary, the microbatch size, the schedule or the layout of ranks."""
    if not plan.has_virtual_stages:
        yield from (replace(plan, stages=stages) for stages in moved_boundaries(plan.stages))
    for size in _other_sizes(problem, plan):
        count = problem.workload.global_batch // (size * plan.sharding.expert)
        with suppress(MeshwrightError):
            graph = problem.graph_for(size)
            yield replace(plan, num_microbatches=count, graph_hash=graph.content_hash, stages=_unshared(plan))
    # On one stage all schedules that flush are one.
    for schedule in problem.choices.schedules if len(plan.stages) > 1 else ():
        if schedule != plan.schedule:
            for chunks in problem.choices.num_chunks:
                with suppress(MeshwrightError):
                    yield adopt_whole(problem, plan, schedule, chunks)
    yield from _other_layouts(plan)


def _unshared(plan: Plan) -> tuple[StagePlan, ...]:
    return tuple(replace(stage, shares=()) for stage in as_chain(plan.stages))


def _other_sizes(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """The allowed sizes next to the plan's."""
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
    """Equal replicas on other ranks."""
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
