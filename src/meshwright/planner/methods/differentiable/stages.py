"""Make the arrays of `stage_arrays` for one setting, microbatch size and schedule of a problem."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, zip_longest

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.layouts import Layout, find_places
from meshwright.planner.methods.differentiable.stage_arrays import Floats, Integers, StageSpace
from meshwright.planner.methods.slicing.assemble import make_problem
from meshwright.planner.methods.slicing.dynamic_program import SlicingProblem, memory_of
from meshwright.planner.space import Space


def make_stages(space: Space, microbatch_size: int, schedule: str) -> StageSpace:
    """Return the arrays of one setting, microbatch size and schedule."""
    tables, num_ranks = space.tables(microbatch_size), space.num_ranks
    shape = len(tables.graph.layers), len(tables.graph.layers) + 1
    places = find_places(
        Layout(name="stage-major", num_ranks=num_ranks),
        space.cluster,
        space.cost,
        replicas=(1,),
        bucket_bytes=space.exchange.bucket_bytes,
        memory=space.memory,
    )
    links, link_of, pair_s = _find_links(space)
    problem = make_problem(
        tables,
        replace(places, links=links),
        in_flight=np.ones((num_ranks, num_ranks + 1), np.int64),
        beside=np.zeros(shape),
        exchange=space.exchange,
        workload=space.workload,
        cost=space.cost,
        offload=space.offload,
    )
    most = min(num_ranks, tables.num_microbatches)
    # The peak memory of a step is convex in the microbatches in flight: the line is an upper bound.
    flights = tables.num_microbatches if schedule == "gpipe" else most
    held, full = _weigh(problem, most), _weigh(problem._replace(in_flight=flights * problem.in_flight), most)
    return StageSpace(
        num_microbatches=tables.num_microbatches,
        num_fills=problem.num_fills,
        keeps_all=schedule == "gpipe",
        overlap=problem.overlap,
        seconds=problem.seconds,
        backward_s=problem.backward_s,
        optimizer_s=problem.optimizer_s,
        exchange_bytes=problem.exchange_bytes,
        transfer_s=problem.transfer_s,
        held_bytes=held,
        more_bytes=(full - held) / max(flights - 1, 1),
        kind_of=places.kind_of[:, 1].copy(),
        link_of=link_of,
        node_of=np.array([space.cluster.node_index(rank) for rank in range(num_ranks)]),
        pair_s=pair_s,
        group_factor=_find_factors(space, pair_s, most),
        memory_limit=places.memory_limit[:, 1].copy(),
    )


def _find_links(space: Space) -> tuple[tuple[tuple[int, int], ...], Integers, Floats]:
    """Return pairs of ranks that represent a link each (the first: no link), each pair's link, and seconds per byte."""
    cluster, bucket = space.cluster, space.exchange.bucket_bytes
    links: list[tuple[int, int]] = [(0, 0)]
    link_of = np.zeros((space.num_ranks, space.num_ranks), np.int64)
    pair_s = np.zeros(link_of.shape)
    known: dict[object, int] = {}
    for pair in combinations(range(space.num_ranks), 2):
        key = cluster.link_between(*pair), cluster.node_index(pair[0]) == cluster.node_index(pair[1])
        if key not in known:
            known[key] = len(links)
            links.append(pair)
        seconds = space.cost.collective_seconds("all_reduce", links[known[key]], bucket) / bucket
        for one, other in (pair, pair[::-1]):
            link_of[one, other], pair_s[one, other] = known[key], seconds
    return tuple(links), link_of, pair_s


def _find_factors(space: Space, pair_s: Floats, most: int) -> Floats:
    """Return the factor of r ranks on a number of nodes over their slowest pair.

    Ranks are taken from the largest nodes in turn.
    """
    ranks: list[list[int]] = [[] for _ in space.cluster.nodes]
    for rank in range(space.num_ranks):
        ranks[space.cluster.node_index(rank)].append(rank)
    ranks = sorted(filter(None, ranks), key=len, reverse=True)
    bucket = space.exchange.bucket_bytes
    factors = np.repeat(2 * (1 - 1 / np.maximum(np.arange(most + 1), 1))[:, None], len(space.cluster.nodes) + 1, axis=1)
    for num_nodes in range(1, len(ranks) + 1):
        dealt = [rank for turn in zip_longest(*ranks[:num_nodes]) for rank in turn if rank is not None]
        for r in range(max(num_nodes, 2), min(len(dealt), most) + 1):
            group = tuple(sorted(dealt[:r]))
            slowest = pair_s[np.ix_(group, group)].max()
            factors[r, num_nodes] = space.cost.collective_seconds("all_reduce", group, bucket) / bucket / slowest
    return factors


@compiled
def _weigh(problem: SlicingProblem, most: int) -> Floats:
    """Return the bytes of every stage with 1 to ``most`` replicas, with the problem's microbatches in flight."""
    num_layers = problem.static_bytes.shape[0]
    table = np.zeros((most + 1, num_layers, num_layers + 1))
    for r in range(1, most + 1):
        for i in range(num_layers):
            for j in range(i + 1, num_layers + 1):
                table[r, i, j] = memory_of(problem, i, j, 0, r)
    return table
