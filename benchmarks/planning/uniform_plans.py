"""Uniform plans: what is laid out on a cluster as if its devices were equal, all of them.

Every stage with as many replicas, layers cut evenly by their number or by their FLOPs (the largest sum as small as can
be), ranks in order (stage by stage, or one pipeline after the other), microbatches in turns; every number of stages
that divides the ranks, and every microbatch size and schedule that is allowed.
"""

from itertools import pairwise, product

import numpy as np

from meshwright.planner.rank_layouts import Layout
from meshwright.spec import Plan


def uniform_plans(problem):
    """All of them, as plans."""
    num_ranks = problem.cluster.num_ranks
    for size, schedule in product(problem.choices.microbatch_sizes, problem.choices.schedules):
        graph = problem.graph_for(size)
        count, num_layers = problem.workload.global_batch // size, len(graph.layers)
        for num_stages in (s for s in range(1, min(num_ranks, num_layers) + 1) if num_ranks % s == 0):
            replicas = num_ranks // num_stages
            if replicas > count:
                continue
            cuts = dict.fromkeys((even_cut(np.ones(num_layers), num_stages), even_cut(layer_flops(graph), num_stages)))
            names = ("stage-major", "replica-major") if 1 < num_stages < num_ranks else ("stage-major",)
            for edges, name in product(cuts, names):
                layout = Layout(name=name, num_ranks=num_ranks, num_stages=num_stages)
                yield Plan(
                    model=problem.model,
                    graph_hash=graph.content_hash,
                    cluster=problem.cluster.name,
                    workload=problem.workload,
                    stages=layout.stages(tuple(pairwise(edges)), (replicas,) * num_stages),
                    num_microbatches=count,
                    schedule=schedule,
                )


def layer_flops(graph):
    """Of forward and backward of one sample."""
    flops = [(op.flops.at(1) + op.backward_flops.at(1)) for op in graph.ops]
    return np.array([sum(flops[layer.start : layer.stop]) for layer in graph.layers], np.float64)


def even_cut(weights, num_stages):
    """Edges of stages, none of them empty, whose largest sum of weights is as small as can be."""
    sums, num_layers = np.concatenate([[0.0], np.cumsum(weights)]), len(weights)
    least = np.full((num_stages + 1, num_layers + 1), np.inf)
    best = np.zeros((num_stages + 1, num_layers + 1), np.int64)
    least[0, 0] = 0.0
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_layers - (num_stages - stage) + 1):
            each = np.maximum(least[stage - 1, :stop], sums[stop] - sums[:stop])
            best[stage, stop] = int(np.argmin(each))
            least[stage, stop] = each[best[stage, stop]]
    edges = [num_layers]
    for stage in range(num_stages, 0, -1):
        edges.append(int(best[stage, edges[-1]]))
    return tuple(reversed(edges))
