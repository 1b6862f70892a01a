"""PipeDream's planner as a search method: what it proposes is a plan of the problem, estimated by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost import CostModel
from meshwright.planner import Choices, Plans, Problem, Proposal, SearchState
from meshwright.planner.methods.pipedream import Level, PipeDreamOptions, load_profile, pipedream, plan_profile
from meshwright.planner.methods.pipedream.pipedream_method import place_stages
from meshwright.spec import Cluster, Graph, PlanError, Workload, load_cluster, load_shipped_graph
from tests.graphs import chain_graph
from tests.planner.searching import search_plans
from tests.simulator.plans import FixedCost, small_cluster

PROFILES = Path(__file__).parent / "profiles"


def search(graph: Graph, cluster: str, batch: int, **options: Any) -> Plans:
    return search_plans(
        lambda _: graph, load_cluster(cluster), Workload(global_batch=batch), method="pipedream", **options
    )


def proposals(problem: Problem) -> list[Proposal]:
    """All that the method proposes where nothing that it proposes can be made."""
    return list(pipedream(problem, SearchState()))


def problem_of(graph: Graph, cost: CostModel, batch: int, sizes: Sequence[int], schedules: Sequence[str]) -> Problem:
    return Problem(
        graph_for=lambda _: graph,
        cluster=cost.cluster,
        workload=Workload(global_batch=batch),
        cost=cost,
        choices=Choices(schedules=tuple(schedules), microbatch_sizes=tuple(sizes)),
    )


@pytest.mark.parametrize(
    ("model", "cluster"), [("gpt-tiny", "4xV100"), ("resnet-tiny", "2x4xV100"), ("gpt-tiny", "1xV100")]
)
def test_plans_use_every_device_and_every_layer(model: str, cluster: str) -> None:
    graph = load_shipped_graph(model)
    plans = search(graph, cluster, 16, schedules=("1f1b", "pipedream"))
    assert plans.coverage.method == "pipedream"
    for item in plans.ranked:
        assert item.fits
        assert item.plan.num_ranks == load_cluster(cluster).num_ranks
        assert item.plan.bounds[0][0] == 0
        assert item.plan.bounds[-1][1] == len(graph.layers)
        assert item.step_time_s >= plans.bound_s


def test_an_even_chain_becomes_a_pipeline_whose_step_is_what_pipedream_says() -> None:
    graph = chain_graph(4)
    cluster = small_cluster(1, 4)
    times = {"forward": 1e-3, "backward": 2e-3, "send": 0.0, "all_reduce": 1e-1, "optimizer": 0.0}
    cost = FixedCost(cluster=cluster, **times)
    found = proposals(problem_of(graph, cost, 8, [1], ["pipedream"]))
    straight = [item for item in found if len(item.plan.stages) == 4]
    assert straight
    assert straight[0].plan.bounds == ((0, 1), (1, 2), (2, 3), (3, 4))
    plans = search_plans(
        lambda _: graph,
        cluster,
        Workload(global_batch=8),
        cost=cost,
        method="pipedream",
        schedules=("pipedream",),
        microbatch_sizes=[1],
    )
    best = plans.ranked[0]
    assert len(best.plan.stages) == 4
    # Eight minibatches of 3 ms in each of four alike stages, never flushed.
    assert best.step_time_s == pytest.approx(8 * 3e-3)
    assert best.estimate_s == pytest.approx(8 * 3e-3)


def test_a_microbatch_stays_in_its_node() -> None:
    # 4 nodes of 4 devices, each with a pipeline of its own: stages of 2, 1 and 1 devices in each.
    levels = [Level(num_machines=4, bandwidth_bytes_per_s=1e10), Level(num_machines=4, bandwidth_bytes_per_s=1.25e9)]
    plan = plan_profile(
        load_profile(PROFILES / "resnet50.graph.txt.gz"), levels, PipeDreamOptions(compression_ratio=1.0)
    )
    assert [stage.replicas for stage in plan.stages] == [(2, 4), (1, 4), (1, 4)]
    stages = place_stages(plan)
    assert [stage.ranks for stage in stages] == [(0, 4, 8, 12, 1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    for microbatch in range(16):
        assert len({stage.rank_of(microbatch) // 4 for stage in stages}) == 1


def test_stages_of_whole_nodes_follow_each_other() -> None:
    levels = [Level(num_machines=8, bandwidth_bytes_per_s=3e10), Level(num_machines=2, bandwidth_bytes_per_s=3.125e9)]
    plan = plan_profile(load_profile(PROFILES / "vgg16.graph.txt.gz"), levels, PipeDreamOptions(compression_ratio=1.0))
    assert [stage.replicas for stage in plan.stages] == [(8, 1), (5, 1), (2, 1), (1, 1)]
    ranks = [stage.ranks for stage in place_stages(plan)]
    assert ranks == [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12), (13, 14), (15,)]


def test_schedules_that_never_flush_get_replicas_that_divide_the_microbatches() -> None:
    graph = load_shipped_graph("resnet-tiny")
    cost = CostModel(cluster=load_cluster("2x4xV100"))
    state = SearchState()
    found = list(pipedream(problem_of(graph, cost, 24, [1, 2, 4], ["pipedream"]), state))
    assert found
    assert not any("expected a multiple" in str(error) for _, error in state.refused)


def test_data_parallelism_is_proposed_beside() -> None:
    graph = load_shipped_graph("gpt-tiny")
    problem = problem_of(graph, CostModel(cluster=load_cluster("4xV100")), 16, [1, 2, 4, 8], ["1f1b"])
    whole = {item.plan.microbatch_size for item in proposals(problem) if len(item.plan.stages) == 1}
    assert whole == {1, 2, 4}  # two microbatches of 8 are too few for four replicas


def test_proposals_come_best_estimate_first_and_stop_when_enough_fit() -> None:
    graph = load_shipped_graph("gpt-tiny")
    problem = problem_of(graph, CostModel(cluster=load_cluster("4xV100")), 16, [1, 2, 4, 8], ["1f1b"])
    every = proposals(problem)
    estimates = [item.estimate_s for item in every]
    assert estimates == sorted(estimates)
    assert len({item.plan for item in every}) == len(every)
    found = search(graph, "4xV100", 16, max_plans=2)
    assert 1 <= len(found.ranked) <= 2 <= found.coverage.num_simulated < len(every)


def test_the_same_plans_twice() -> None:
    graph = load_shipped_graph("resnet-tiny")
    first, second = (search(graph, "2x4xV100", 32) for _ in range(2))
    assert [item.plan for item in first.ranked] == [item.plan for item in second.ranked]


def test_only_numbers_of_stages_that_are_allowed() -> None:
    graph = load_shipped_graph("gpt-tiny")
    assert {len(item.plan.stages) for item in search(graph, "4xV100", 16, num_stages=[4]).ranked} == {4}
    with pytest.raises(PlanError, match=r"chooses the number of stages itself and finds no plan with \[3\] stages"):
        search(graph, "4xV100", 16, num_stages=[3])


def test_what_a_schedule_refuses_is_noted() -> None:
    # Tied parameters on several stages have no meaning where weights change under way.
    plans = search(load_shipped_graph("gpt2-small"), "4xV100", 16, schedules=("pipedream", "1f1b"))
    assert any("share the parameter" in reason for _, reason in plans.refused)
    assert plans.ranked


def test_unequal_devices_are_planned_for_the_slowest() -> None:
    fast, slow = load_cluster("4xA100"), load_cluster("4xV100")
    cluster = Cluster(
        name="both",
        device_kinds=(*fast.device_kinds, *slow.device_kinds),
        nodes=tuple(replace(node, name=name) for node, name in zip(fast.nodes + slow.nodes, "ab", strict=True)),
    )
    graph = load_shipped_graph("gpt-tiny")
    slowest = CostModel(cluster=load_cluster("2x4xV100"))
    mixed = proposals(problem_of(graph, CostModel(cluster=cluster), 32, [2], ["1f1b"]))
    assert mixed[0].plan.num_ranks == 8
    same = [item.estimate_s for item in proposals(problem_of(graph, slowest, 32, [2], ["1f1b"])) if _is_whole(item)]
    assert [item.estimate_s for item in mixed if _is_whole(item)] == pytest.approx(same, rel=0.1)


def _is_whole(item: Proposal) -> bool:
    return len(item.plan.stages) == 1
