"""States and plans: a plan that the search finds is a state, and a state that cannot be says what to change."""

from dataclasses import replace

import pytest

from meshwright.playground import state_of_plan
from meshwright.playground.controls import AS_PLANNED
from meshwright.playground.opened_plans import plan_key
from meshwright.playground.page_layout import make_plan, workload_of
from meshwright.spec import (
    GradientExchange,
    Loader,
    MeshwrightError,
    Offload,
    PlanError,
    PlaygroundError,
    Sharding,
    StagePlan,
    check_plan,
    load_cluster,
)
from tests.graphs import chain_graph
from tests.planner.searching import search_plans
from tests.playground.examples import NUM_LAYERS, make_bench, make_state

STATE = make_state(num_nodes=2, devices_per_node=4, num_stages=3, replicas=(2,), cuts=(4, 8))


@pytest.mark.parametrize("cluster", ["6xA100", "2x3xA100"])
def test_every_plan_of_a_search_is_a_state_that_gives_the_plan_again(cluster):
    graph = chain_graph(NUM_LAYERS, width=64)
    machine = load_cluster(cluster)
    nodes = len(machine.nodes)
    on = make_state(num_nodes=nodes, devices_per_node=6 // nodes, global_batch=16)
    plans = search_plans(lambda _: graph, machine, workload_of(on), model="chain", max_plans=12)
    assert len(plans.ranked) > 3
    for item in plans.ranked:
        state = state_of_plan(item.plan, on)
        assert make_plan(state, graph, machine, state.cuts, ()) == item.plan


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [
        ("stage-major", (2,)),
        ("stage-major", (1, 2, 3)),
        ("replica-major", (2,)),
        ("reversed", (2,)),
        ("reversed", (1, 2, 3)),
    ],
)
def test_every_layout_is_recognised(layout, replicas):
    state = replace(STATE, layout=layout, replicas=replicas)
    assert state_of_plan(make_bench().answer(state).plan, STATE) == state


def test_the_plan_of_a_state_fits_its_graph_and_says_what_the_state_says():
    bench = make_bench()
    answer = bench.answer(replace(STATE, schedule="gpipe", overlap=False, bucket_mib=0.5, optimizer="sgd-momentum"))
    plan = answer.plan
    check_plan(plan, answer.graph, answer.cluster)
    assert plan.bounds == ((0, 4), (4, 8), (8, 12))
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3), (4, 5)]
    assert (plan.schedule, plan.exchange.overlap, plan.exchange.bucket_bytes) == ("gpipe", False, 2**19)
    assert (plan.num_microbatches, plan.workload.optimizer.name) == (32, "sgd+momentum")
    assert plan.cluster == "2x4xA100"


def test_automatic_replicas_fill_devices_and_microbatches():
    bench = make_bench()
    auto = replace(STATE, replicas=())
    assert [len(stage.ranks) for stage in bench.answer(auto).plan.stages] == [2, 2, 2]
    assert [len(stage.ranks) for stage in bench.answer(replace(auto, num_stages=1, cuts=())).plan.stages] == [8]
    few = replace(auto, num_stages=1, cuts=(), global_batch=6)
    assert [len(stage.ranks) for stage in bench.answer(few).plan.stages] == [3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_stages": 13, "cuts": (), "replicas": (1,)}, "Choose at most 12 stages"),
        ({"replicas": (3,)}, "at most 2 replicas per stage"),
        ({"num_stages": 9, "cuts": (), "replicas": ()}, "at most 8 stages"),
        ({"replicas": (1, 2)}, "one for each"),
        ({"replicas": (1, 2, 1), "layout": "replica-major"}, "stage-major, or equal replicas"),
        ({"cuts": (8, 4)}, "balanced cuts"),
        ({"cuts": (4,)}, "balanced cuts"),
        ({"cuts": (4, 12)}, "between 1 and 11"),
        ({"microbatch_size": 3}, "Choose microbatches of 2"),
        ({"microbatch_size": 64}, "at most 1 replica, smaller"),
        ({"global_batch": 65_536, "microbatch_size": 1}, "larger microbatches"),
        ({"model": "chian"}, "did you mean 'chain'"),
        (
            {"global_batch": 65_536, "microbatch_size": 1024, "kind": "cpu", "slowdown": 100.0, "model": "heavy"},
            "500,000 s",
        ),
    ],
)
def test_a_state_without_a_plan_says_what_to_change(changes, words):
    bench = make_bench()
    heavy = chain_graph(12, width=200_000)
    bench.models["heavy"] = replace(bench.models["chain"], open=lambda: lambda _: heavy)
    with pytest.raises(MeshwrightError) as caught:
        bench.answer(replace(STATE, **changes))
    assert isinstance(caught.value, PlanError | PlaygroundError)
    assert words in str(caught.value)


def test_what_no_control_says_is_as_in_the_plan():
    plan = make_bench().answer(STATE).plan
    ranks = [(0, 5), (2, 3), (4, 1)]
    odd = tuple(StagePlan(start=s.start, stop=s.stop, ranks=r) for s, r in zip(plan.stages, ranks, strict=True))
    own = {"schedule": "mine.py:order", "schedule_hash": "0" * 16}
    fed = replace(plan.workload, loader=Loader(seconds_per_sample=1e-3))
    for changes, field in (
        ({"stages": odd}, "layout"),
        (own, "schedule"),
        ({"recompute": ((1, 2),)}, "recompute"),
        ({"exchange": GradientExchange(clip_norm=True)}, "rest"),
        ({"workload": fed}, "rest"),
        ({"sharding": Sharding(context=2, context_method="all_gather")}, "rest"),
    ):
        changed = replace(plan, **changes)
        state = state_of_plan(changed, STATE)
        assert getattr(state, field) == AS_PLANNED
        assert state.given == plan_key(changed)
    said = replace(
        plan, exchange=GradientExchange(zero=1), sharding=Sharding(tensor=2), offload=Offload(optimizer="host")
    )
    state = state_of_plan(said, STATE)
    assert (state.zero, state.tensor, state.offload, state.needs_plan) == (1, 2, "optimizer=host", False)
