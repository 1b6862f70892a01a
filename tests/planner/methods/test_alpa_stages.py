"""Alpa's inter-operator pass: clusters of layers, submeshes, stages by both objectives, and the method as a whole."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem
from meshwright.planner.methods.alpa import alpa_method as stages
from meshwright.planner.methods.alpa.alpa_method import cluster_layers, slice_stages, submeshes
from meshwright.spec import MeshwrightError, PlanError, Sharding, Workload, load_cluster, load_shipped_graph
from tests.marks import examples
from tests.planner.searching import search_plans

pytest.importorskip("highspy")


def problem_of(name, cluster, batch, **choices):
    graph, cluster = load_shipped_graph(name), load_cluster(cluster)
    return Problem(
        graph_for=lambda size: graph,
        cluster=cluster,
        workload=Workload(global_batch=batch),
        cost=CostModel(cluster=cluster),
        choices=Choices(**choices),
    )


def rank_clustering(edges, entering, flops):
    """What is minimised, in this order."""
    runs = list(itertools.pairwise(edges))
    return (
        max(entering[i] for i, _ in runs),
        sum(entering[i] for i, _ in runs),
        sum(sum(flops[i:j]) ** 2 for i, j in runs),
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 8), st.data())
def test_clusters_are_those_that_trying_all_finds(layers, num_clusters, data):
    num_clusters = min(num_clusters, len(layers))
    entering, flops = ([float(row[at]) for row in layers] for at in (0, 1))
    slack = data.draw(st.sampled_from([0.0, 0.3, 0.6, 2.0]))
    found = cluster_layers(np.array(entering), np.array(flops), num_clusters, slack)
    every = [(0, *inner, len(layers)) for inner in itertools.combinations(range(1, len(layers)), num_clusters - 1)]
    limit = max((1 + slack) * sum(flops) / num_clusters, *flops)
    while True:
        fitting = [e for e in every if all(sum(flops[i:j]) <= limit + 1e-9 for i, j in itertools.pairwise(e))]
        if fitting:
            break
        limit *= 1.1
    assert found in fitting
    best = min(rank_clustering(edges, entering, flops) for edges in fitting)
    assert rank_clustering(found, entering, flops) == pytest.approx(best)


def test_more_clusters_than_layers_are_refused():
    with pytest.raises(PlanError, match="expected 1 to 2"):
        cluster_layers(np.ones(2), np.ones(2), 3)


def test_submeshes_are_powers_of_two_in_a_node_and_whole_nodes():
    cluster = load_cluster("3x4xA100")
    assert submeshes(cluster, 12) == (1, 2, 4, 8, 12)
    assert submeshes(cluster, 12, 2) == (1, 2, 4, 6)
    assert submeshes(cluster, 8, 4) == (1, 2)
    assert submeshes(load_cluster("6xA100"), 6) == (1, 2, 4, 6)


@pytest.mark.parametrize(("cluster", "size"), [("4xA100", 1), ("2x2xA100", 2), ("6xA100", 4)])
def test_stages_by_the_papers_objective_are_those_that_trying_all_finds(cluster, size):
    problem = problem_of("gpt-tiny", cluster, 16)
    space = next(problem.spaces())
    found = slice_stages(space, size, "1f1b", "alpa")
    assert found is not None
    table = next(iter(space.tables(size).seconds.values())).total
    num_layers, num_ranks, num_microbatches = len(table), space.num_ranks, 16 // size
    allowed, best = submeshes(space.cluster, num_ranks), np.inf
    for count in range(1, num_layers + 1):
        for cuts in itertools.combinations(range(1, num_layers), count - 1):
            edges = list(itertools.pairwise((0, *cuts, num_layers)))
            for replicas in itertools.product(allowed, repeat=count):
                if sum(replicas) == num_ranks and max(replicas) <= num_microbatches:
                    times = [table[i, j] for i, j in edges]
                    rest = [(-(-num_microbatches // r) - 1) * t for t, r in zip(times, replicas, strict=True)]
                    best = min(best, sum(times) + max(rest))
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert sum(len(stage.ranks) for stage in found.plan.stages) == num_ranks
    estimated = slice_stages(space, size, "1f1b", "estimated")
    assert estimated is not None
    assert estimated.seconds > found.seconds


def test_merged_layers_are_cut_at_their_edges_alone(monkeypatch):
    problem = problem_of("vgg-tiny", "4xA100", 16)
    space = next(problem.spaces())
    free = slice_stages(space, 2, "1f1b", "alpa")
    monkeypatch.setattr(stages, "MAX_LAYERS", 4)
    merged = slice_stages(space, 2, "1f1b", "alpa")
    assert free is not None
    assert merged is not None
    assert len(space.graph_for(2).layers) > 4
    assert merged.seconds >= free.seconds * (1 - 1e-12)
    tables = space.tables(2)
    cut = [stage.start for stage in merged.plan.stages]
    # What is said of a merged stage is what is said of its layers.
    times = [tables.seconds[next(iter(tables.seconds))].total[s.start, s.stop] for s in merged.plan.stages]
    rest = [(-(-8 // len(s.ranks)) - 1) * t for s, t in zip(merged.plan.stages, times, strict=True)]
    assert merged.seconds == pytest.approx(sum(times) + max(rest))
    assert cut[0] == 0


def search(**facts):
    graph = load_shipped_graph("llama-tiny")
    given_facts = {"method": "alpa", "shardings": [Sharding(), Sharding(tensor=2)], "max_plans": 6} | facts
    return search_plans(
        lambda size: graph, load_cluster("4xA100"), Workload(global_batch=16), microbatch_sizes=[4], **given_facts
    )


def test_the_method_adds_placements_of_its_own_to_the_shardings_that_were_given():
    found = search()
    assert any(item.plan.sharding.placements for item in found.ranked)
    assert any(item.plan.sharding.is_whole for item in found.ranked)
    for item in found.ranked:
        assert item.plan.sharding.width * sum(len(stage.ranks) for stage in item.plan.stages) == 4
    again = search()
    assert [item.plan for item in found.ranked] == [item.plan for item in again.ranked]


def test_what_the_method_cannot_do_is_said(monkeypatch):
    with pytest.raises(PlanError, match="Add --schedule 1f1b, or use another method"):
        search(schedules=["interleaved"])
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(MeshwrightError, match=r"meshwright\[search\]"):
        search()
    assert search(shardings=[Sharding()]).ranked
