"""The uniform grid: bounds that no simulated configuration beats, and the best of all configurations."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner import Choices, Problem, evaluate_plan, list_shardings
from meshwright.planner.methods.grid import bound_grid
from meshwright.planner.methods.grid.figures import Figures
from meshwright.planner.methods.grid.grid_method import plans_of
from meshwright.planner.short import shorten
from meshwright.spec import Graph, Offload, Sharding, Workload, load_cluster, load_shipped_graph, read_recompute
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.sharding import UNSHARDED
from meshwright.templates import decoder_graph
from meshwright.templates.shapes import TransformerShape
from tests.planner.searching import solve
from tests.planner.test_search import cluster_of, weighted_graph

OPTIMIZER_AWAY = Offload(optimizer="host")
STATES_AWAY = Offload(optimizer="host", parameters="host")


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return load_shipped_graph("gpt2-xl")


def problem_of(graph, cluster, batch, **choices):
    workload = Workload(global_batch=batch, precision="bfloat16", kind=graph.mode)
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=workload,
        cost=CostModel(cluster=cluster, precision="bfloat16"),
        choices=Choices(**choices),
    )


def every_configuration(problem):
    found = bound_grid(problem)
    for sheet in found.sheets:
        sheet.refine()
        for row in range(len(sheet.seconds)):
            yield sheet.seconds[row], sheet.bytes[row], sheet.configuration(row)


def test_a_short_graph_stands_for_the_long_one(gpt):
    short = shorten(gpt)
    assert len(short.graph.layers) == len(gpt.layers) - (48 - 3)
    assert [gpt.layers[i].block for i in range(len(gpt.layers))] == [
        short.graph.layers[i].block for i in short.stands_for
    ]


@pytest.mark.parametrize("sharding", [UNSHARDED, Sharding(tensor=5), Sharding(context=2)])
@pytest.mark.parametrize("recompute", ["none", "full", "op"])
def test_figures_of_layers_are_those_of_the_whole_graph(gpt, sharding, recompute):
    problem = problem_of(gpt, load_cluster("2x10xA100"), 64, shardings=(sharding,), recompute=(recompute,))
    seconds = Figures(problem, shorten(gpt), sharding).seconds(2, recompute)
    space = next(iter(problem.spaces()))
    (kind,) = space.cluster.device_kinds
    costs = space.cost.estimate_ops(space.graph_for(2), 2, kind)
    starts = [layer.start for layer in space.graph_for(2).layers]
    np.testing.assert_allclose(seconds.forward[0], np.add.reduceat(costs.forward_s, starts), rtol=1e-6)
    backward = np.add.reduceat(costs.backward_s + costs.accumulate_s, starts)
    np.testing.assert_allclose(seconds.backward[0], backward, rtol=1e-6)


@pytest.mark.parametrize(
    ("cluster", "batch", "choices"),
    [
        (cluster_of(4), 8, {}),
        (cluster_of(2, 2, slow_nic=1e8), 8, {"zero": (0, 1, 3)}),
        (cluster_of(4, rates=(1e12, 3e11)), 12, {}),
        (cluster_of(4), 16, {"schedules": ("1f1b", "interleaved", "zb-h1"), "num_chunks": (2, 3)}),
    ],
)
def test_no_configuration_is_faster_or_smaller_than_its_bounds(cluster, batch, choices):
    graph = weighted_graph([10**8 * amount for amount in (4, 1, 1, 1, 1, 1, 1, 9)], width=256)
    problem = problem_of(graph, cluster, batch, **choices)
    count = 0
    for seconds, num_bytes, configuration in every_configuration(problem):
        for plan in plans_of(problem, configuration):
            item = evaluate_plan(plan, graph, cluster, problem.cost)
            assert 0 < seconds <= item.step_time_s * (1 + 1e-9), configuration
            assert 0 < num_bytes <= max(item.peak_memory_bytes), configuration
            count += 1
    assert count > 10


@pytest.mark.parametrize(
    ("layers", "hidden", "vocab", "batch", "choices"),
    [
        (2, 2048, 60000, 64, {"zero": (2, 3), "num_stages": (2,)}),
        (8, 4096, 1000, 8, {"zero": (0,), "num_stages": (1,)}),
    ],
)
def test_exchanges_of_large_and_of_tied_parameters_bound_what_is_simulated(layers, hidden, vocab, batch, choices):
    """Stages keep an embedding whole that they share; a gradient larger than a bucket is summed at a better rate."""
    shape = TransformerShape(
        layers=layers, hidden=hidden, heads=16, kv_heads=16, head_dim=hidden // 16, ffn=4 * hidden, vocab=vocab
    )
    graph = decoder_graph(replace(shape, max_positions=16), 16)
    problem = problem_of(graph, load_cluster("8xH100"), batch, microbatch_sizes=(1,), **choices)
    for seconds, _, configuration in every_configuration(problem):
        for plan in plans_of(problem, configuration):
            assert 0 < seconds <= evaluate_plan(plan, graph, problem.cluster, problem.cost).step_time_s, configuration


def test_exchanges_are_bounded_by_those_on_the_fastest_nodes():
    """The first stage lies on the nodes with slow links, the second one on those with fast ones."""
    graph = load_shipped_graph("vgg16")
    cluster = load_cluster(Path(__file__).parents[3] / "benchmarks" / "clusters" / "l40s-a100-ethernet.toml")
    problem = problem_of(graph, cluster, 512, microbatch_sizes=(8,), zero=(0, 3), num_stages=(2, 4))
    for seconds, _, configuration in every_configuration(problem):
        for plan in plans_of(problem, configuration):
            assert 0 < seconds <= evaluate_plan(plan, graph, problem.cluster, problem.cost).step_time_s, configuration


@pytest.mark.parametrize(("vocab", "tokens", "hidden"), [(32_000, 64, 256), (1_000, 256, 512)])
@pytest.mark.parametrize("away", [ON_DEVICE, OPTIMIZER_AWAY, Offload(activations="host"), STATES_AWAY])
def test_no_layout_holds_less_than_it_is_said_to_need(vocab, tokens, hidden, away):
    """Of a large head beside few tokens, and the reverse; ZeRO 2 and 3 add no gradients to wider ones."""
    shape = TransformerShape(
        layers=4, hidden=hidden, heads=4, kv_heads=4, head_dim=hidden // 4, ffn=4 * hidden, vocab=vocab
    )
    graph, cluster = decoder_graph(replace(shape, max_positions=tokens), tokens), load_cluster("4xH100")
    choices = Choices(
        zero=(3,) if away.parameters == "host" else (0, 1, 2, 3),
        recompute=("none", "full"),
        offload=(away,),
        schedules=("gpipe", "1f1b", "interleaved"),
        num_stages=(1, 2, 4),
    )
    problem = Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=16, precision="mixed"),
        cost=CostModel(cluster=cluster, precision="mixed"),
        choices=choices,
    )
    grid, shares = bound_grid(problem), []
    for sheet in grid.sheets:
        for row in range(len(sheet.seconds)):
            configuration = sheet.configuration(row)
            needed = grid.share_needed(configuration) * sheet.limit_bytes
            for plan in plans_of(problem, configuration):
                item = evaluate_plan(plan, graph, cluster, problem.cost)
                shares.append(needed / max(item.peak_memory_bytes))
                assert shares[-1] <= 1, configuration
    assert len(shares) > 20
    assert max(shares) > 0.8


def test_words_that_depend_on_the_place_bound_what_they_mean():
    """Not all equal blocks, or not all stages, compute again."""
    graph, cluster = load_shipped_graph("gpt-tiny"), cluster_of(2)
    words = ("every-2", "1:2", "full@0,op@1", "op@1")
    problem = problem_of(graph, cluster, 8, num_stages=(2,), recompute=words, microbatch_sizes=(2,))
    found = {}
    for seconds, num_bytes, configuration in every_configuration(problem):
        for plan in plans_of(problem, configuration):
            item = evaluate_plan(plan, graph, cluster, problem.cost)
            assert 0 < seconds <= item.step_time_s * (1 + 1e-9), configuration
            assert 0 < num_bytes <= max(item.peak_memory_bytes), configuration
            assert (plan.recompute, plan.keeps) == read_recompute(graph, configuration.recompute, plan.bounds)
            found[configuration.recompute] = item.step_time_s
    assert found.keys() == {*words}
    assert found["full@0,op@1"] > found["op@1"]


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_answer_is_the_best_of_all_configurations(mode):
    graph = weighted_graph([10**8 * amount for amount in (4, 1, 1, 1, 9)], width=256, mode=mode)
    cluster = cluster_of(2, 2, slow_nic=1e8)
    problem = problem_of(graph, cluster, 8, zero=(0, 1) if mode == "training" else (0,))
    items = [
        evaluate_plan(plan, graph, cluster, problem.cost)
        for _, _, configuration in every_configuration(problem)
        for plan in plans_of(problem, configuration)
    ]
    found = solve(problem, "grid")
    assert min(item.step_time_s for item in found.ranked) == pytest.approx(
        min(item.step_time_s for item in items), rel=2e-4
    )
    assert found.coverage.num_simulated <= len(items)
    assert "No other uniform configuration is faster" in found.explain()


def test_memory_prunes_what_cannot_fit(gpt):
    """GPT-2 XL needs 25 GB of states: on devices of 8 GiB nothing fits whole, and no row that may fit is whole."""
    cluster = load_cluster("8xA100")
    problem = problem_of(gpt, cluster, 32, microbatch_sizes=(1,), recompute=("full",), zero=(0, 3))
    small = replace(problem, memory=MemoryLimit(num_bytes=8 * 2**30))
    fitting = [row for _, num_bytes, row in every_configuration(small) if num_bytes <= 8 * 2**30]
    assert fitting
    assert all(row.positions > 1 or row.zero == 3 for row in fitting)
    assert solve(small, "grid").best.fits


def test_axes_are_choices(gpt):
    problem = problem_of(
        gpt,
        load_cluster("2x5xA100"),
        20,
        shardings=list_shardings(tensor=(1, 5, 7), context=(1, 2)),
        microbatch_sizes=(1, 2),
        recompute=("none", "full"),
    )
    found = bound_grid(problem)
    rows = [sheet.configuration(row).sharding for sheet in found.sheets for row in range(len(sheet.seconds))]
    assert {(item.tensor, item.context) for item in rows} == {(1, 1), (5, 1), (5, 2)}
    best = solve(problem, "grid", max_plans=3).best
    whole = solve(replace(problem, choices=replace(problem.choices, shardings=(UNSHARDED,))), "grid", max_plans=1).best
    assert best.step_time_s <= whole.step_time_s


@pytest.mark.parametrize(("most", "is_proven"), [(1, False), (256, True)])
def test_only_a_search_that_went_on_until_bounds_ended_it_says_that_it_proves(monkeypatch, most, is_proven):
    """The first configuration by bound is not the last that may be the best; each has plans in one or two layouts."""
    module = sys.modules["meshwright.planner.methods.grid.grid_method"]
    monkeypatch.setattr(module, "MOST_SIMULATED", most)
    graph = weighted_graph([10**8 * amount for amount in (4, 1, 1, 1, 9)], width=256)
    found = solve(problem_of(graph, cluster_of(2, 2, slow_nic=1e8), 8), "grid")
    assert ("No other uniform configuration is faster" in found.explain()) == is_proven
    assert ("No uniform configuration takes less than" in found.explain()) != is_proven


def test_a_clock_that_ends_before_all_is_bounded_proves_nothing():
    graph = load_shipped_graph("gpt-tiny")
    shardings = list_shardings(tensor=(1, 2), context=(1, 2))
    problem = problem_of(graph, load_cluster("4xA100"), 8, shardings=shardings)
    assert bound_grid(problem).is_complete
    some = bound_grid(problem, lambda: 0.0)
    assert not some.is_complete
    assert 0 < some.num_configurations < bound_grid(problem).num_configurations
