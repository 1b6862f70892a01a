"""The best order for a plan's own stages: simulated, it is never slower than a named one that fits."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner import evaluate_plan, find_order
from meshwright.program import (
    SCHEDULES,
    build_program,
    compute_orders,
    picture_schedule,
    with_schedule,
)
from meshwright.simulator import allocate_rank, simulate_plan, stage_times
from meshwright.spec import Opcode, PlanError, load_cluster, with_branches
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.program.check import check_program
from tests.program.layouts import plan_of
from tests.program.own import ALL, pipeline
from tests.simulator.plans import FixedCost, small_cluster

CLUSTERS = ["4x1xA100", "1x4xA100", "4xcpu"]


def named_that_fit(plan, graph, cost, limit):
    """Step times of the named schedules that take the plan's stages and fit."""
    found = {}
    for name in SCHEDULES:
        try:
            item = evaluate_plan(
                with_schedule(plan, name), graph, cost.cluster, cost, memory=MemoryLimit(num_bytes=limit)
            )
        except PlanError:
            continue
        if item.fits:
            found[name] = item.step_time_s
    return found


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved", "dualpipe"])
@pytest.mark.matrix
def test_simulated_it_is_never_slower_than_a_named_one_that_fits(tmp_path, schedule, cluster):
    plan, graph = plan_of(schedule, 4, 12)
    cost = CostModel(cluster=load_cluster(cluster))
    peaks = evaluate_plan(plan, graph, cost.cluster, cost).reserved_bytes
    for limit in (None, max(peaks), max(peaks) * 9 // 10):
        named = named_that_fit(plan, graph, cost, limit)
        try:
            found = find_order(
                plan, graph, cost.cluster, tmp_path / "o.csv", cost=cost, memory=MemoryLimit(num_bytes=limit)
            )
        except PlanError as error:
            found = error
        if isinstance(found, PlanError):
            assert not named
            continue
        assert {item.plan.schedule: item.step_time_s for item in found.named if item.fits} == named
        assert found.best.step_time_s <= min(named.values(), default=np.inf)
        assert found.best.fits
        # The file that was written says the same.
        again = evaluate_plan(found.best.plan, graph, cost.cluster, cost, memory=MemoryLimit(num_bytes=limit))
        assert again == found.best
        assert found.best.plan.schedule == (found.name or str(tmp_path / "o.csv"))
        assert (tmp_path / "o.csv").read_bytes().decode() == found.text
        assert (f"faster than {found.name}, which the plan follows" in found.explain()) == bool(found.name)
        filed = compute_orders(with_schedule(plan, str(tmp_path / "o.csv")))
        assert [order.columns for order in filed] == [order.columns for order in compute_orders(found.best.plan)]


def diamond(*replicas):
    """(plan, graph): stages 1 and 2 both read stage 0, stage 3 reads both; the plan does not say so yet."""
    graph = chain_graph(4, reads={2: 0}, skips=((1, 3),))
    return make_plan(graph, even_bounds(4, 4), list(replicas), 12), graph


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 2)])
@pytest.mark.matrix
def test_on_branches_it_is_never_slower_than_a_named_one_that_fits(tmp_path, replicas):
    plan, graph = diamond(*replicas)
    cost = CostModel(cluster=load_cluster("6x1xA100"))
    for item in (plan, with_branches(plan, graph)):
        # Ranks far below their limit are not followed op by op.
        tight = MemoryLimit(num_bytes=2**20)
        peaks = evaluate_plan(item, graph, cost.cluster, cost, memory=tight).reserved_bytes
        for limit in (None, max(peaks)):
            path = tmp_path / f"{limit}.csv"
            found = find_order(item, graph, cost.cluster, path, cost=cost, memory=MemoryLimit(num_bytes=limit))
            assert found.best.step_time_s <= min(named_that_fit(item, graph, cost, limit).values())
            assert found.best.fits
            # An order that was found relies on the branches, so that the plan has them; one by name stays as it was.
            assert found.best.plan.has_branches == (item.has_branches or not found.name)
            picture_schedule(found.best.plan)
            # The file is a schedule like any other for the same stages.
            followed = with_schedule(with_branches(item, graph), str(path))
            check_program(build_program(followed, graph))
            again = evaluate_plan(followed, graph, cost.cluster, cost, memory=MemoryLimit(num_bytes=limit))
            assert again.step_time_s == found.best.step_time_s


@pytest.mark.parametrize("branches", [False, True])
def test_the_simulator_takes_what_the_model_says_where_links_are_free(tmp_path, branches):
    """Times of stages, transfers and memory that the search is given are those that the simulator charges."""
    plan, graph = diamond(1, 1, 1, 1) if branches else plan_of("1f1b", 4, 12)
    plan = with_branches(plan, graph)
    cost = FixedCost(cluster=small_cluster(1, 4), forward=3.0, backward=5.0, send=0.25, optimizer=1e-9)
    found = find_order(plan, graph, cost.cluster, tmp_path / "orders.csv", cost=cost)
    times = stage_times(plan, graph, cost)
    assert np.asarray(times.forward_ps)[1, 1] == 3e12
    assert (np.asarray(times.inputs_ps) + np.asarray(times.weights_ps))[1, 1] == 5e12
    # Stage 0 of the diamond sends to stage 1 and then to stage 2, stage 3 returns as much.
    for between, ways in ((times.sending_ps, [1, 2, 1, 1]), (times.returning_ps, [1, 1, 1, 2])):
        assert np.asarray(between).tolist() == [0.25e12 * way for way in (ways if branches else [1, 1, 1])]
    assert found.model.length_ps == found.model.bound_ps
    # Backwards in two parts are not followed op by op.
    assert allocate_rank(found.best.plan, graph, cost.cluster, 1) is None
    timeline = simulate_plan(found.best.plan, graph, cost.cluster, cost=cost).timeline
    computed = np.isin(
        timeline.opcode, (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
    )
    assert timeline.end_ps[computed].max() == found.model.length_ps


def test_whole_backwards_can_be_run(tmp_path):
    plan, graph = plan_of("1f1b", 4, 12)
    cluster = load_cluster("4x1xA100")
    found = find_order(plan, graph, cluster, tmp_path / "orders.csv", whole=True)
    assert found.best.plan.is_runnable
    kinds = np.concatenate([order.columns.opcode for order in compute_orders(found.best.plan)])
    assert set(kinds.tolist()) == {Opcode.FORWARD, Opcode.BACKWARD}
    assert {item.plan.schedule for item in found.named} >= {"gpipe", "1f1b"}
    assert not {item.plan.schedule for item in found.named} & {"zb-h1", "zb-h2"}


def test_a_plan_keeps_its_own_order_if_none_is_faster(tmp_path):
    (tmp_path / "mine.py").write_text(ALL)
    graph, plan = pipeline(2, 4)
    plan = with_schedule(plan, f"{tmp_path}/mine.py:eager")
    found = find_order(plan, graph, load_cluster("2xcpu"), tmp_path / "orders.csv")
    own = evaluate_plan(plan, graph, load_cluster("2xcpu"), CostModel(cluster=load_cluster("2xcpu")))
    assert plan in [item.plan for item in found.named]
    assert found.best.step_time_s <= own.step_time_s


def test_what_nothing_fits_leaves_no_file(tmp_path):
    plan, graph = plan_of("1f1b", 4, 12)
    with pytest.raises(PlanError, match="No order of these stages fits"):
        find_order(plan, graph, load_cluster("4xA100"), tmp_path / "orders.csv", memory=MemoryLimit(num_bytes=10))
    inference = replace(plan, workload=replace(plan.workload, kind="inference"))
    with pytest.raises(PlanError, match="inference"):
        find_order(inference, graph, load_cluster("4xA100"), tmp_path / "orders.csv")
    with pytest.raises(PlanError, match="is asynchronous; orders are searched for synchronous schedules"):
        find_order(replace(plan, schedule="pipedream"), graph, load_cluster("4xA100"), tmp_path / "orders.csv")
    assert not (tmp_path / "orders.csv").exists()


def test_unequal_replicas(tmp_path):
    graph = chain_graph(3)
    plan = make_plan(graph, even_bounds(3, 3), [2, 1, 1], 12)
    cost = CostModel(cluster=load_cluster("4xA100"))
    found = find_order(plan, graph, cost.cluster, tmp_path / "orders.csv", cost=cost)
    assert found.best.step_time_s <= min(named_that_fit(plan, graph, cost, None).values())
    assert len(found.text.splitlines()) == 4
