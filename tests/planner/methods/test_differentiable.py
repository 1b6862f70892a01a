"""Plans by gradients: the closed form and its relaxation, repair by single moves, and what the method proposes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem, SearchState, evaluate_plan
from meshwright.planner.methods.differentiable import differentiable, differentiable_method
from meshwright.planner.methods.differentiable.relaxed import Logits, Smooth, make_stages
from meshwright.planner.methods.differentiable.stage_repair import layout_cost, repair_layout
from meshwright.planner.methods.slicing import CandidateSearch
from meshwright.spec import GradientExchange, Workload, check_plan, load_cluster, load_shipped_graph
from tests.planner.searching import solve
from tests.planner.test_search import GIB, cluster_of, weighted_graph


def problem_of(flops, counts, batch=8, *, rates=(1e12,), memory=GIB, mode="training", **exchange):
    graph = weighted_graph([int(1e9 * amount) for amount in flops], mode=mode)
    cluster = cluster_of(*counts, rates=rates, memory=memory)
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(kind=mode, global_batch=batch),
        cost=CostModel(cluster=cluster),
        model="chain",
        exchange=GradientExchange(**exchange),
    )


def space_of(problem):
    (space,) = problem.spaces()
    return space


def unequal_stages(schedule="1f1b"):
    """Nine layers on three nodes of two devices, two of a kind."""
    problem = problem_of((4, 1, 6, 2, 2, 8, 1, 3, 5), (2, 2, 2), rates=(1e12, 4e11))
    return make_stages(space_of(problem), 1, schedule)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("counts", [(4,), (2, 2), (3, 2)])
def test_the_closed_form_is_that_of_slicing(counts, mode):
    """Where ranks are taken in their order, on equal devices; slicing costs groups, not pairs, of ranks."""
    space = space_of(problem_of((4, 1, 6, 2, 2, 8), counts, mode=mode))
    compared = 0
    for candidate in CandidateSearch(space, ["1f1b"], SearchState()).run():
        plan = candidate.plan
        stages = make_stages(space, plan.microbatch_size, "1f1b")
        stage_of = np.zeros(space.num_ranks, np.int64)
        for place, stage in enumerate(plan.stages):
            stage_of[list(stage.ranks)] = place
        edges = np.array([0, *(stage.stop for stage in plan.stages)])
        seconds, excess = layout_cost(stages, edges, stage_of)
        assert seconds == pytest.approx(candidate.estimate_s, rel=0.02)
        assert excess == 0
        compared += 1
    assert compared > 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bytes_above_memory_are_those_of_the_simulator(schedule):
    """A limit between what the ranks of a plan need."""
    # Large enough for the workspaces of cuBLAS not to matter, which the search does not count.
    graph, cluster = load_shipped_graph("gpt2-small"), load_cluster("4xV100")
    workload = Workload(global_batch=64)
    problem = Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=workload,
        cost=CostModel(cluster=cluster),
        choices=Choices(microbatch_sizes=(8,), num_stages=(3,), schedules=(schedule,)),
    )
    (option,) = differentiable_method._options(problem)
    edges, stage_of = np.array([0, 4, 9, len(graph.layers)]), np.array([0, 0, 1, 2])
    layout = differentiable_method.StageLayout(edges=edges, stage_of=stage_of, seconds=1.0, excess=0.0)
    peaks = evaluate_plan(option.plan(layout), graph, cluster, problem.cost).peak_memory_bytes
    limit = sorted(peaks)[1]
    expected = sum(max(peak / limit - 1, 0) for peak in peaks)
    _, excess = layout_cost(option.stages._replace(memory_limit=np.full(4, float(limit))), edges, stage_of)
    assert expected > 0.1
    assert excess == pytest.approx(expected, rel=0.25)


def test_stages_that_cannot_be():
    stages = unequal_stages()
    edges = np.array([0, 3, 9])
    assert layout_cost(stages, edges, np.zeros(6, np.int64)) == (np.inf, np.inf)
    few = stages._replace(num_microbatches=2)
    assert layout_cost(few, edges, np.array([0, 0, 0, 1, 1, 1])) == (np.inf, np.inf)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 6))
def test_repair_ends_where_no_single_move_gains(seed, num_stages):
    stages, random = unequal_stages(), np.random.default_rng(seed)
    edges = np.array([0, *np.sort(1 + random.choice(8, num_stages - 1, replace=False)), 9])
    stage_of = random.permutation(np.arange(6) % num_stages)
    before = layout_cost(stages, edges, stage_of)
    counts = np.bincount(stage_of)
    found = repair_layout(stages, edges, stage_of)
    assert found[::-1] <= before[::-1]
    assert np.bincount(stage_of).tolist() == counts.tolist()
    for cut in range(1, num_stages):
        for place in range(edges[cut - 1] + 1, edges[cut + 1]):
            moved = edges.copy()
            moved[cut] = place
            assert layout_cost(stages, moved, stage_of)[0] >= found[0] * (1 - 1e-8)
    for one, other in itertools.combinations(range(6), 2):
        swapped = stage_of.copy()
        swapped[[one, other]] = stage_of[[other, one]]
        assert layout_cost(stages, edges, swapped)[0] >= found[0] * (1 - 1e-8)


def test_repair_prefers_what_fits():
    """A slow device with enough memory takes the stage that needs it, though that is slower."""
    stages = make_stages(space_of(problem_of((6, 1), (1, 1), rates=(1e12, 4e11))), 1, "1f1b")
    held = np.array([[[0, 10, 11], [0, 0, 1]]] * 3, float)
    edges, stage_of = np.array([0, 1, 2]), np.array([0, 1])
    stages = stages._replace(held_bytes=held, more_bytes=0 * held, memory_limit=np.array([2.0, 20.0]))
    seconds, excess = layout_cost(stages, edges, stage_of)
    assert excess == 4.0
    found = repair_layout(stages, edges, stage_of)
    assert stage_of.tolist() == [1, 0]
    assert found[1] == 0
    assert found[0] > seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_the_gradient_is_the_derivative(num_stages, schedule):
    stages, random = unequal_stages(schedule), np.random.default_rng(num_stages)
    # Memory that is short for some, and gradients that take a while.
    limit = stages.held_bytes[1, 0, 9] * random.uniform(0.2, 1, 6)
    stages = stages._replace(memory_limit=limit, pair_s=1e3 * stages.pair_s, transfer_s=1e2 * stages.transfer_s)
    smooth = Smooth(stages, num_stages)
    logits = Logits(random.normal(size=(num_stages - 1, 8)), random.normal(size=(6, num_stages)))
    _, gradient = smooth.gradient(logits, 0.7, 0.1, 3.0)
    flat, found = logits.flat(), gradient.flat()
    for place in range(len(flat)):
        step = 1e-6 * np.eye(len(flat))[place]
        slope = smooth.gradient(logits.like(flat + step), 0.7, 0.1, 3.0)[0]
        slope -= smooth.gradient(logits.like(flat - step), 0.7, 0.1, 3.0)[0]
        assert found[place] == pytest.approx(slope / 2e-6, rel=1e-3, abs=1e-4 * np.abs(found).max())


def test_sharp_shares_cost_what_the_closed_form_says():
    """One-hot shares on one kind of device, without transfers: nothing is smooth any more."""
    space = space_of(problem_of((4, 1, 6, 2, 2, 8), (4,)))
    stages = make_stages(space, 1, "1f1b")
    stages = stages._replace(
        transfer_s=0 * stages.transfer_s, optimizer_s=0 * stages.optimizer_s, pair_s=0 * stages.pair_s
    )
    edges, stage_of = np.array([0, 3, 6]), np.array([0, 0, 1, 1])
    logits = Logits(1e3 * np.eye(5)[edges[1:-1] - 1], 1e3 * np.eye(2)[stage_of])
    cost, _ = Smooth(stages, 2).gradient(logits, 1.0, 1e-4, 1.0)
    assert cost == pytest.approx(layout_cost(stages, edges, stage_of)[0], rel=1e-3)


def test_rounding_leaves_no_stage_without_a_rank():
    stages = unequal_stages()
    logits = Logits(np.zeros((3, 8)), np.tile([3.0, 0.0, 1.0, 2.0], (6, 1)))
    found = differentiable_method.round_logits(stages, logits)
    assert set(found.stage_of) == {0, 1, 2, 3}
    assert np.isfinite(found.seconds)


# --- the method ---


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_every_proposal_is_a_plan_on_all_devices(mode, monkeypatch):
    monkeypatch.setattr(differentiable_method, "NUM_DRAWS", 15)
    problem = problem_of((4, 1, 6, 2, 2), (2, 1), rates=(1e12, 4e11), mode=mode)
    plans = solve(problem, differentiable)
    assert len(plans.ranked) > 1
    for item in plans.ranked:
        check_plan(item.plan, problem.graph_for(1), problem.cluster)
        assert item.plan.num_ranks == 3
        assert item.fits
    again = solve(problem_of((4, 1, 6, 2, 2), (2, 1), rates=(1e12, 4e11), mode=mode), differentiable)
    assert [item.plan for item in again.ranked] == [item.plan for item in plans.ranked]


def test_devices_out_of_order_are_put_together(monkeypatch):
    """Fast and slow nodes in turn: stages of replicas on consecutive ranks are as slow as the slowest of each."""
    monkeypatch.setattr(differentiable_method, "NUM_DRAWS", 30)
    problem = problem_of((5, 5, 5, 5, 5, 5), (1, 1, 1, 1), rates=(1e12, 2e11))
    found, sliced = solve(problem, differentiable).best, solve(problem, "slicing").best
    assert found.step_time_s <= sliced.step_time_s


def test_tight_memory_is_kept(monkeypatch):
    monkeypatch.setattr(differentiable_method, "NUM_DRAWS", 30)
    problem = problem_of((4, 4, 4, 4, 4), (4,), memory=170_000)
    assert max(solve(problem, differentiable).best.peak_memory_bytes) <= 170_000


def test_one_device_and_one_op():
    assert solve(problem_of((4,), (1,)), differentiable).best.plan.num_ranks == 1


def test_memory_that_was_short_lowers_the_limit():
    problem = problem_of((4, 1, 6, 2, 2, 8), (3,))
    option = next(item for item in differentiable_method._options(problem) if item.num_stages == 3)
    layout = option.draw(np.random.default_rng(0), gradients=False)
    result = evaluate_plan(option.plan(layout), problem.graph_for(1), problem.cluster, problem.cost)
    short = tuple(peak // 2 for peak in result.peak_memory_bytes)
    before = option.stages.memory_limit.copy()
    option.learn(layout, replace(result, memory_limit_bytes=short))
    assert option.best is None
    assert option.stages.memory_limit == pytest.approx(before / 2, rel=0.01)
    assert option.ratio == result.step_time_s / layout.seconds
