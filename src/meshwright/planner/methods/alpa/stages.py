"""The inter-operator pass: group layers into stages, each on a submesh, within the memory of 1F1B (Alpa, section 5).

A plan has one sharding for all stages. So the logical mesh of every submesh of q devices is q / t replicas of teams of
t devices (tensor-parallel groups), and the intra-operator pass has placed ops for teams of t. Submeshes are 1, 2, 4,
... devices of a node, or whole nodes. The remaining problem is slicing with few numbers of replicas, which `slicing`
solves exactly, with all devices used and 1F1B's microbatches in flight and memory included. There are two objectives,
for M microbatches:

    alpa      Σ t + (M / r - 1) max t     transfers between stages, gradient reduction and optimizer cost nothing
    estimated the closed form of `slicing`: with transfers over the slowest link into a stage, gradient reduction and
              optimizer
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from meshwright.planner.layouts import Layout, find_places
from meshwright.planner.methods.alpa.clusters import cluster_layers
from meshwright.planner.methods.slicing import SlicingProblem, solve_slicing
from meshwright.planner.methods.slicing.assemble import assume_in_flight, make_problem
from meshwright.planner.space import Space
from meshwright.spec import Cluster, Plan

Objective = Literal["alpa", "estimated"]
# The most layers between whose boundaries stages are cut; more layers are merged first. The largest of Alpa's models
# has this number of blocks.
MAX_LAYERS = 64


class Staged(NamedTuple):
    """A plan of a space's local graph, and its seconds by the objective."""

    plan: Plan
    seconds: float


def submeshes(cluster: Cluster, num_devices: int, width: int = 1) -> tuple[int, ...]:
    """Return the numbers of replicas (teams of ``width`` devices) on submeshes.

    A submesh has 1, 2, 4, ... devices of a node, or whole nodes.
    """
    in_node = min(node.num_devices for node in cluster.nodes if node.num_devices)
    powers = {2**p for p in range(in_node.bit_length()) if 2**p <= in_node}
    sizes = powers | set(range(in_node, num_devices + 1, in_node))
    return tuple(sorted(size // width for size in sizes if size % width == 0 and size <= num_devices))


def slice_stages(space: Space, microbatch_size: int, schedule: str, objective: Objective) -> Staged | None:
    """Return the best stages of a space's layers on submeshes; None if no stages fit."""
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
    """Return the problem in which only computing takes time; memory is the same."""
    return problem._replace(
        transfer_s=np.zeros_like(problem.transfer_s),
        latency_s=np.zeros_like(problem.latency_s),
        bucket_s=np.zeros_like(problem.bucket_s),
        shared_s=np.zeros_like(problem.shared_s),
        optimizer_s=np.zeros_like(problem.optimizer_s),
    )


def merge_layers(problem: SlicingProblem, edges: tuple[int, ...]) -> SlicingProblem:
    """Return the problem whose layers are runs of layers, from one edge to the next."""
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
