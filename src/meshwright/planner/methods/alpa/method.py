"""The method: for each setting of a problem, place ops by the integer program, then stages on submeshes.

Alpa's logical mesh of a submesh is dp x mp; a plan's is replicas x tensor. For every allowed tensor width and every
microbatch size, the intra-operator pass places the ops of one team, with samples left to the replicas; if a plan can
express the placements, they become one more sharding besides the given one. Placements that a plan cannot express are
left out, as are those that need more than a device's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from meshwright.planner.choices import Setting
from meshwright.planner.method import Proposal, SearchState, Steps
from meshwright.planner.methods.alpa.express import express
from meshwright.planner.methods.alpa.intra import amounts_of, place_ops
from meshwright.planner.methods.alpa.mesh import mesh_of_cluster
from meshwright.planner.methods.alpa.stages import Objective, slice_stages
from meshwright.planner.problem import Problem
from meshwright.planner.space import Space
from meshwright.spec import MeshwrightError, Plan, PlanError
from meshwright.spec.plan import BASIC_SCHEDULES
from meshwright.spec.sharding import Sharding

OBJECTIVES: tuple[Objective, ...] = ("estimated", "alpa")

# After other methods, the number of microbatch sizes for which ops are placed.
NEAR_SIZES = 2


class _Found(NamedTuple):
    """A plan of the whole graph, its seconds, and the objective that they belong to."""

    plan: Plan
    seconds: float
    objective: Objective


def alpa(problem: Problem, state: SearchState, objectives: Sequence[Objective] = OBJECTIVES) -> Steps:
    """Place ops, slice stages by each of the objectives, and propose the plans in their order.

    Raises MeshwrightError without highspy, if ops are to be split.
    """
    schedules = [name for name in problem.choices.schedules if name in BASIC_SCHEDULES]
    if not schedules:
        raise PlanError(
            f"Alpa's stages are found for {' and '.join(BASIC_SCHEDULES)}, but only "
            f"{', '.join(problem.choices.schedules)} may be chosen. Allow one of them, or use another method."
        )
    found: list[_Found] = []
    errors: list[MeshwrightError] = []
    for setting, sizes in _settings(problem, state):
        try:
            found += _staged(problem.space(setting), sizes, schedules, objectives, state)
        except MeshwrightError as error:
            errors.append(error)
    if not found and errors:
        raise errors[0]
    seen: set[Plan] = set()
    for objective in objectives:
        ranked = sorted((item for item in found if item.objective == objective), key=lambda item: item.seconds)
        for item in [item for item in ranked if item.plan not in seen][: state.max_plans]:
            seen.add(item.plan)
            yield Proposal(item.plan, item.seconds)


def _settings(problem: Problem, state: SearchState) -> Iterator[tuple[Setting, tuple[int, ...]]]:
    """Yield settings with the microbatch sizes to try (empty: all), those with Alpa's own placements last."""
    near = _near_sizes(state)
    yield from ((setting, near) for setting in problem.settings())
    placed: dict[tuple[int, Sharding], Sharding | None] = {}
    for setting in problem.settings():
        given = setting.sharding
        if given.tensor == 1 or given.tensor != given.width or given.placements:
            continue
        by_sharding: dict[Sharding, list[int]] = {}
        for size in problem.microbatch_sizes(problem.workload):
            key = size, Sharding(tensor=given.tensor)
            if near and size not in near:
                continue
            if key not in placed and state.seconds_left() > 0:
                placed[key] = _place(problem, size, given.tensor, setting.num_devices)
            own = placed.get(key)
            if own is not None and own != given:
                by_sharding.setdefault(own, []).append(size)
        yield from ((setting._replace(sharding=own), tuple(sizes)) for own, sizes in by_sharding.items())


def _near_sizes(state: SearchState) -> tuple[int, ...]:
    """Return the microbatch sizes of other methods' best plans; an integer program takes as long as a search."""
    best = sorted(state.fitting, key=lambda item: item.aimed_s)
    return tuple(dict.fromkeys(item.plan.microbatch_size for item in best))[:NEAR_SIZES]


def _place(problem: Problem, microbatch_size: int, width: int, num_devices: int) -> Sharding | None:
    """Return placements of one team's ops, as a sharding; None if a plan cannot express them."""
    graph = problem.graph_for(microbatch_size)
    replicas = max(num_devices // width, 1)
    work = amounts_of(
        graph,
        problem.workload,
        problem.cost,
        batch_size=microbatch_size,
        num_microbatches=max(problem.workload.global_batch // (microbatch_size * replicas), 1),
    )
    mesh = mesh_of_cluster(problem.cost, (1, width))
    # On one axis the integer program is small enough for every op to choose.
    placements = place_ops(graph, mesh, work, uses=("samples", "model"), following=False)
    try:
        return express(placements).sharding
    except PlanError:
        return None


def _staged(
    space: Space, sizes: tuple[int, ...], schedules: Sequence[str], objectives: Sequence[Objective], state: SearchState
) -> Iterator[_Found]:
    near = tuple(size for size in sizes if size in space.microbatch_sizes)
    for size, schedule, objective in product(near or space.microbatch_sizes, schedules, objectives):
        if state.seconds_left() <= 0:
            return
        staged = slice_stages(space, size, schedule, objective)
        state.count(considered=1)
        if staged is not None:
            yield _Found(space.whole(staged.plan), staged.seconds, objective)
