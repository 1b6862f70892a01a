"""Alpa's search method (`alpa`): for each setting, place ops by an integer program, then stages on submeshes.

Alpa's logical mesh of a submesh is dp x mp; that of a plan is replicas x tensor. For every allowed tensor width and
every microbatch size, the intra-operator pass places the ops of one team (tensor-parallel group); the replicas split
the samples. If a plan can express the placements, they become one more sharding besides the given one. Other
placements are left out, as are those that exceed a device's memory. `cluster_layers` merges layers before
`slice_stages` cuts them into stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.choices import Setting
from meshwright.planner.methods.alpa.express import express
from meshwright.planner.methods.alpa.intra import amounts_of, place_ops
from meshwright.planner.methods.alpa.mesh import Floats, Integers, mesh_of_cluster
from meshwright.planner.methods.slicing import SlicingProblem, solve_slicing
from meshwright.planner.methods.slicing.assemble import assume_in_flight, make_problem
from meshwright.planner.problem import Problem
from meshwright.planner.rank_layouts import Layout, find_places
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.planner.space import Space
from meshwright.spec import Cluster, MeshwrightError, Plan, PlanError, Sharding
from meshwright.spec.schedules import BASIC_SCHEDULES

# Alpa's own slack ε of a layer's FLOPs, its option `layer_construct_eps`.
SLACK = 0.6


# Operator clustering merges many layers into few, so that stages have fewer possible cuts (Alpa, section 5.2). Layers
# are merged into l runs by dynamic programs over (layers, runs): first the smallest possible maximum of bytes that
# enter a run; among those the least sum of these bytes, then the least variance of the runs' FLOPs. A run has at most
# (1 + ε) times the mean FLOPs, or the FLOPs of the largest layer if that is more.
def cluster_layers(entering_bytes: Floats, flops: Floats, num_clusters: int, slack: float = SLACK) -> tuple[int, ...]:
    """Merge L layers into ``num_clusters`` runs of layers; return their edges: 0, the later starts, and L.

    ``entering_bytes`` (L,) cross the boundary before each layer; ``flops`` (L,) are those of each layer. A run may have
    at most ``1 + slack`` times the mean FLOPs; if that is impossible, this limit is raised by 10 % until it is
    possible. Raises PlanError unless ``num_clusters`` is 1 to L.
    """
    num_layers = len(flops)
    if not 1 <= num_clusters <= num_layers:
        raise PlanError(f"num_clusters is {num_clusters}; expected 1 to {num_layers}, the number of layers.")
    limit = max((1 + slack) * flops.sum() / num_clusters, float(flops.max(initial=0.0)))
    while True:
        most = _least_largest(entering_bytes, flops, num_clusters, limit)
        if np.isfinite(most):
            starts = _least_sums(entering_bytes, flops, num_clusters, limit, most)
            return (*starts.tolist(), num_layers)
        limit *= 1.1


@compiled
def _least_largest(entering: Floats, flops: Floats, num_clusters: int, limit: float) -> float:
    """Return the smallest possible maximum of bytes that enter a run."""
    num_layers = len(flops)
    best = np.full((num_clusters + 1, num_layers + 1), np.inf)
    best[0, num_layers] = 0.0
    for runs in range(1, num_clusters + 1):
        for i in range(num_layers - 1, -1, -1):
            size = 0.0
            for j in range(i + 1, num_layers + 1):
                size += flops[j - 1]
                if size > limit * (1.0 + 1e-12):
                    break
                best[runs, i] = min(best[runs, i], max(entering[i], best[runs - 1, j]))
    return float(best[num_clusters, 0])


@compiled
def _least_sums(entering: Floats, flops: Floats, num_clusters: int, limit: float, most: float) -> Integers:
    """Return the starts of the runs with the least sum of bytes, then of squared FLOPs."""
    num_layers = len(flops)
    sums = np.full((num_clusters + 1, num_layers + 1), np.inf)
    squares = np.full((num_clusters + 1, num_layers + 1), np.inf)
    stops = np.zeros((num_clusters + 1, num_layers + 1), np.int64)
    sums[0, num_layers] = squares[0, num_layers] = 0.0
    for runs in range(1, num_clusters + 1):
        for i in range(num_layers - 1, -1, -1):
            if entering[i] > most:
                continue
            size = 0.0
            for j in range(i + 1, num_layers + 1):
                size += flops[j - 1]
                if size > limit * (1.0 + 1e-12):
                    break
                total, square = entering[i] + sums[runs - 1, j], size * size + squares[runs - 1, j]
                if total < sums[runs, i] or (total == sums[runs, i] and square < squares[runs, i]):
                    sums[runs, i], squares[runs, i], stops[runs, i] = total, square, j
    starts = np.zeros(num_clusters, np.int64)
    for runs in range(num_clusters, 1, -1):
        starts[num_clusters - runs + 1] = stops[runs, starts[num_clusters - runs]]
    return starts


Objective = Literal["alpa", "estimated"]
# The most layers between whose boundaries stages are cut; more layers are merged first. The largest of Alpa's models
# has this number of blocks.
MAX_LAYERS = 64


class Staged(NamedTuple):
    """A plan for a team's local graph, and its step time in seconds under the objective that found it."""

    plan: Plan
    seconds: float


def submeshes(cluster: Cluster, num_devices: int, width: int = 1) -> tuple[int, ...]:
    """Return the possible numbers of replicas of a stage, ascending: teams of ``width`` devices on one submesh.

    A submesh has 1, 2, 4, ... devices of one node, or whole nodes, and at most ``num_devices`` devices.
    """
    in_node = min(node.num_devices for node in cluster.nodes if node.num_devices)
    powers = {2**p for p in range(in_node.bit_length()) if 2**p <= in_node}
    sizes = powers | set(range(in_node, num_devices + 1, in_node))
    return tuple(sorted(size // width for size in sizes if size % width == 0 and size <= num_devices))


# The inter-operator pass groups layers into stages, each on a submesh, within the memory of 1F1B (Alpa, section 5). A
# plan has one sharding for all stages. So the logical mesh of every submesh of q devices is q / t replicas of teams of
# t devices (tensor-parallel groups), and the intra-operator pass has placed ops for teams of t. The remaining problem
# is slicing with few numbers of replicas, which `slicing` solves exactly, with all devices used and 1F1B's microbatches
# in flight and memory included. There are two objectives, for M microbatches:
#
#     alpa      Σ t + (M / r - 1) max t     transfers between stages, gradient reduction and optimizer cost nothing
#     estimated the closed form of `slicing`: with transfers over the slowest link into a stage, gradient reduction and
#               optimizer
def slice_stages(space: Space, microbatch_size: int, schedule: str, objective: Objective) -> Staged | None:
    """Return the plan with the best stages on submeshes under an objective; None if no stages fit into memory."""
    width = space.setting.sharding.width
    there = space.problem.cluster.without(space.setting.idle)
    replicas = space.shareable(submeshes(there, space.setting.num_devices, width), microbatch_size)
    if not replicas:
        return None
    layout = Layout(name="stage-major", num_ranks=space.num_ranks)
    problem = _problem(space, microbatch_size, schedule, layout, replicas)
    edges = _edges(space, microbatch_size)
    merged = merge_layers(without_communication(problem) if objective == "alpa" else problem, edges)
    tried = [solve_slicing(merged, replicas=replicas, num_stages=n) for n in space.num_stages or (None,)]
    found = min(filter(None, tried), key=lambda slicing: slicing.seconds, default=None)
    if found is None:
        return None
    tables = space.tables(microbatch_size)
    bounds = [(edges[start], edges[stop]) for start, stop in found.bounds]
    plan = space.make_plan(layout.stages(bounds, found.replicas), tables.microbatch_size, schedule)
    return Staged(plan, found.seconds)


def without_communication(problem: SlicingProblem) -> SlicingProblem:
    """Return the problem with zero time for transfers, gradient reduction and optimizer; memory is unchanged."""
    return problem._replace(
        transfer_s=np.zeros_like(problem.transfer_s),
        latency_s=np.zeros_like(problem.latency_s),
        bucket_s=np.zeros_like(problem.bucket_s),
        shared_s=np.zeros_like(problem.shared_s),
        optimizer_s=np.zeros_like(problem.optimizer_s),
    )


def merge_layers(problem: SlicingProblem, edges: tuple[int, ...]) -> SlicingProblem:
    """Return the problem with merged layers: its layer i is the layers ``edges[i]`` to ``edges[i + 1] - 1``."""
    starts, stops = np.array(edges[:-1]), np.array(edges)
    # Compiled loops are specialised by memory layout, so keep it contiguous.
    of_stages: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(problem, name)[..., starts[:, None], stops[None, :]])
        for name in problem._fields
        if name in ("seconds", "backward_s", "optimizer_s") or (name.endswith("_bytes") and name != "bucket_bytes")
        if name != "most_bytes"
    }
    most = np.ascontiguousarray(problem.most_bytes[:, starts[:, None], stops[None, :]])
    transfers = np.ascontiguousarray(problem.transfer_s[:, starts])
    return problem._replace(**of_stages, most_bytes=most, transfer_s=transfers)


def _edges(space: Space, microbatch_size: int) -> tuple[int, ...]:
    tables = space.tables(microbatch_size)
    graph = tables.graph
    if len(graph.layers) <= MAX_LAYERS:
        return tuple(range(len(graph.layers) + 1))
    flops = [
        sum((op.flops + op.backward_flops).at(microbatch_size) for op in graph.ops[layer.start : layer.stop])
        for layer in graph.layers
    ]
    return cluster_layers(np.array(tables.bytes.crossing_forward, np.float64), np.array(flops, np.float64), MAX_LAYERS)


def _problem(
    space: Space, microbatch_size: int, schedule: str, layout: Layout, replicas: tuple[int, ...]
) -> SlicingProblem:
    tables = space.tables(microbatch_size)
    num_layers = len(tables.graph.layers)
    places = find_places(
        layout,
        space.cluster,
        space.cost,
        replicas=replicas,
        bucket_bytes=space.exchange.bucket_bytes,
        memory=space.memory,
        shard_size=space.exchange.shard_size,
    )
    return make_problem(
        tables,
        places,
        in_flight=assume_in_flight(schedule, tables.num_microbatches, layout.num_ranks, space.workload.kind),
        beside=np.zeros((num_layers, num_layers + 1)),
        exchange=space.exchange,
        workload=space.workload,
        cost=space.cost,
        offload=space.offload,
    )


OBJECTIVES: tuple[Objective, ...] = ("estimated", "alpa")

# After other methods, the number of microbatch sizes for which ops are placed.
NEAR_SIZES = 2


class _Found(NamedTuple):
    """A plan of the whole graph, its seconds, and the objective that they belong to."""

    plan: Plan
    seconds: float
    objective: Objective


def alpa(problem: Problem, state: SearchState, objectives: Sequence[Objective] = OBJECTIVES) -> Steps:
    """Propose Alpa's plans: for each objective, the best plans first.

    Raises PlanError unless gpipe or 1f1b is allowed, and MeshwrightError if ops are to be split, but highspy is not
    installed.
    """
    schedules = [name for name in problem.choices.schedules if name in BASIC_SCHEDULES]
    if not schedules:
        raise PlanError(
            f"The method alpa supports the schedules {' and '.join(BASIC_SCHEDULES)}, but only "
            f"{', '.join(problem.choices.schedules)} may be chosen. Add --schedule 1f1b, or use another method."
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
