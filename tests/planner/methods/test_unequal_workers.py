"""Virtual workers: allocation by policy, cuts against brute force, plans of waves on the simulator."""

import itertools
from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem
from meshwright.planner.methods.unequal import POLICIES, allocate, form_workers, plan_workers
from meshwright.simulator import simulate_plan
from meshwright.spec import Cluster, DeviceGroup, PlanError, Workload, load_cluster
from tests.graphs import chain_graph
from tests.planner.searching import solve

SLOWDOWNS = (1.0, 1.5, 2.0, 4.0)


def four_nodes(*, per_node=2, slowdowns=SLOWDOWNS):
    """Nodes of equal devices; a node's devices take ``slowdowns`` times as long as usual."""
    shipped = load_cluster("A100")
    usual, node = shipped.device_kinds[0], shipped.nodes[0]
    kinds = tuple(replace(usual, name=f"k{i}", slowdown=factor, usual=usual.name) for i, factor in enumerate(slowdowns))
    nodes = tuple(
        replace(node, name=f"n{i}", devices=(DeviceGroup(kind=kind.name, count=per_node),))
        for i, kind in enumerate(kinds)
    )
    return Cluster(name="four", device_kinds=kinds, nodes=nodes)


def space_on(cluster, *, layers=8, batch=64):
    return next(problem_on(cluster, layers=layers, batch=batch).spaces())


def problem_on(cluster, *, layers=8, batch=64, schedules=("hetpipe",)):
    graph = chain_graph(layers, width=2048)
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=batch),
        cost=CostModel(cluster=cluster, precision="float32"),
        choices=Choices(microbatch_sizes=(4,), schedules=schedules),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_every_device_is_in_one_worker(policy):
    workers = allocate(four_nodes(), policy)
    assert sorted(itertools.chain(*workers)) == list(range(8))


def test_policies_share_devices_as_the_paper_says():
    cluster = four_nodes()
    assert allocate(cluster, "node") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert allocate(cluster, "equal") == ((0, 2, 4, 6), (1, 3, 5, 7))
    # The fastest node with the slowest, the two in the middle.
    assert {frozenset(worker) for worker in allocate(cluster, "hybrid")} == {
        frozenset(worker) for worker in ((0, 6), (1, 7), (2, 4), (3, 5))
    }


def by_all_orders(space, ranks, wave):
    """The least bottleneck of all orders of devices and all cuts; seconds of a minibatch."""
    tables = space.tables(4)
    kinds = [space.cluster.device_kind(rank).name for rank in ranks]
    num_layers = len(tables.graph.layers)
    best = float("inf")
    for order in itertools.permutations(range(len(ranks))):
        for cuts in itertools.combinations(range(1, num_layers), len(ranks) - 1):
            edges = (0, *cuts, num_layers)
            slowest = 0.0
            for place, (i, j) in zip(order, itertools.pairwise(edges), strict=True):
                own = tables.seconds[kinds[place]]
                crossing = (
                    tables.bytes.crossing_forward[i] if i else 0.0,
                    tables.bytes.crossing_backward[i] if i else 0.0,
                )
                sent = 0.0
                if i:
                    pair = ranks[order[order.index(place) - 1]], ranks[place]
                    sent = sum(space.cost.collective_seconds("send", pair, size) for size in crossing if size)
                slowest = max(slowest, float(own.total[i, j] + own.optimizer[i, j]), sent)
            best = min(best, slowest)
    return best


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_are_cut_as_well_as_can_be(policy):
    space = space_on(four_nodes())
    found = form_workers(space, 4, policy)
    assert found.wave == 16 // len(found.workers)
    for worker in found.workers:
        assert worker.minibatch_s == pytest.approx(by_all_orders(space, worker.ranks, found.wave), rel=1e-9)
    assert found.wave_s == found.wave * max(worker.minibatch_s for worker in found.workers)


def test_equal_distribution_is_a_plan_that_takes_what_it_says():
    problem = problem_on(four_nodes(), batch=256)
    (space,) = problem.spaces()
    workers = form_workers(space, 4, "equal")
    plan = plan_workers(space, 4, workers)
    assert plan.schedule == "hetpipe"
    assert [len(stage.ranks) for stage in plan.stages] == [2] * 4
    plan = replace(plan, exchange=replace(plan.exchange, staleness=1))
    seconds = simulate_plan(plan, problem.graph_for(4), problem.cluster, cost=problem.cost).step_time_s
    # The simulator adds copies of weights and sums of waves where they wait.
    assert workers.wave_s <= seconds * (1 + 1e-6)
    assert seconds <= 1.6 * workers.wave_s
    assert "virtual workers (equal)" in workers.explain(problem.cluster)


def test_workers_that_differ_are_no_plan():
    space = space_on(four_nodes(slowdowns=(1.0, 1.0, 1.0, 6.0)))
    workers = form_workers(space, 4, "hybrid")
    with pytest.raises(PlanError, match="a plan has the same cuts for all replicas"):
        plan_workers(space, 4, workers)


def test_the_method_proposes_waves_where_they_are_allowed():
    found = solve(problem_on(four_nodes()), "unequal")
    assert found.best.plan.schedule == "hetpipe"
    assert len(found.best.plan.stages[0].ranks) == 2


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(PlanError, match="a number of workers that divides 2"):
        allocate(four_nodes(), "equal", 3)
    with pytest.raises(PlanError, match="expected an even number"):
        allocate(four_nodes(slowdowns=SLOWDOWNS[:3]), "hybrid")
    with pytest.raises(PlanError, match="cannot be divided equally among 4 virtual workers"):
        form_workers(space_on(four_nodes(), batch=24), 4, "node")
