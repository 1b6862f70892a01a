"""Plans and workloads: what a plan says of itself, and which plans do not fit."""

from dataclasses import replace

import pytest
from hypothesis import given

from meshwright.spec import (
    GradientExchange,
    GraphError,
    GraphMismatchError,
    Optimizer,
    PlanError,
    StagePlan,
    Workload,
    check_plan,
    load_cluster,
)
from meshwright.spec.sharding import UNSHARDED
from meshwright.spec.used_devices import devices_per_node, used_of, visible_devices
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.spec.examples import PLAN
from tests.strategies import plans

GRAPH = chain_graph(6)
FITTING = make_plan(GRAPH, even_bounds(6, 3), [2, 1, 1], 4)


@given(plans())
def test_every_rank_has_a_stage_and_every_microbatch_one_rank(plan):
    stages = [plan.stages_of(rank) for rank in range(plan.num_ranks)]
    for index, stage in enumerate(plan.stages):
        assert sorted(stage.ranks) == [rank for rank, where in enumerate(stages) if index in where]
        computed = [stage.rank_of(microbatch) for microbatch in range(plan.num_microbatches)]
        assert set(computed) == set(stage.ranks)
        counts = [computed.count(rank) for rank in stage.ranks]
        assert tuple(counts) == stage.counts(plan.num_microbatches)
        assert stage.shares in ((), tuple(counts))
        assert stage.shares or max(counts) - min(counts) <= 1
    assert plan.microbatch_size * plan.num_microbatches == plan.workload.global_batch
    assert plan.bounds == tuple((stage.start, stage.stop) for stage in plan.stages)


def test_the_line_for_people():
    line = "2 stages [0:1 ×2, 1:2 ×1], 4 microbatches of 3, mine.py:waves"
    split = ", tensor 2 with sequence parallelism, context 2"
    order = ", 2 parts of gradients in order"
    assert PLAN.describe() == f"{line}{split}{order}, 1 part recomputed, compiled, 2 devices left out"
    assert replace(PLAN, sharding=UNSHARDED, recompute=(), keeps=(), idle=()).describe() == f"{line}{order}, compiled"
    plain = replace(PLAN, sharding=UNSHARDED, recompute=(), keeps=(), idle=(), compiled=False)
    assert replace(plain, exchange=GradientExchange()).describe() == line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "no stages"),
        ({"stages": (StagePlan(start=0, stop=2, ranks=()),)}, "at least one rank"),
        ({"stages": (StagePlan(start=0, stop=2, ranks=(1,)),)}, "ranks 0 to 0 to be used"),
        ({"stages": (StagePlan(start=0, stop=2, ranks=(0, 0)),)}, "none twice"),
        ({"num_microbatches": 0}, "does not divide"),
        ({"schedule": "1f2b"}, r"no schedule '1f2b' \(did you mean '1f1b'\?\).*file.py:function"),
        ({"schedule": "gpipe"}, "which has no file"),
        ({"schedule_hash": ""}, "16 hexadecimal digits"),
        ({"schedule_hash": "0123456789ABCDEF"}, "16 hexadecimal digits"),
        ({"num_microbatches": 5}, "12 samples does not divide into 5 microbatches.*divides 12"),
        ({"num_microbatches": 1}, "2 replicas for 1 microbatches"),
    ],
)
def test_plans_that_contradict_themselves(changes, message):
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **changes)


def test_a_plan_that_fits():
    check_plan(FITTING, GRAPH, load_cluster("4xcpu"))
    check_plan(FITTING, GRAPH)


def test_plans_that_do_not_fit():
    other = chain_graph(6, width=5)
    with pytest.raises(
        GraphMismatchError, match=f"{GRAPH.content_hash}.*{other.content_hash}.*plan again|make the plan again"
    ):
        check_plan(FITTING, other)
    with pytest.raises(PlanError, match="4 devices, but cluster '3xcpu' has 3 devices"):
        check_plan(FITTING, GRAPH, load_cluster("3xcpu"))
    with pytest.raises(PlanError, match="every layer needs a stage"):
        check_plan(replace(FITTING, stages=(replace(FITTING.stages[0], ranks=(0,)),)), GRAPH)
    inference = replace(FITTING, workload=replace(FITTING.workload, kind="inference"))
    with pytest.raises(PlanError, match="plan is for inference"):
        check_plan(inference, GRAPH)
    fixed = replace(GRAPH, batch_size=3)
    with pytest.raises(GraphError, match="batches of 3 samples only"):
        check_plan(replace(FITTING, graph_hash=fixed.content_hash), fixed)


def test_a_renamed_graph_is_the_same_graph():
    check_plan(FITTING, replace(GRAPH, name="renamed"))


@pytest.mark.parametrize(
    ("option", "optimizer"),
    [
        ("adamw", Optimizer(kind="adamw")),
        ("sgd", Optimizer(kind="sgd")),
        ("sgd-momentum", Optimizer(kind="sgd", momentum=True)),
    ],
)
def test_optimizers_are_asked_for_by_a_word(option, optimizer):
    assert Optimizer.named(option) == optimizer
    assert optimizer.option == option


def test_no_other_word_is_an_optimizer():
    with pytest.raises(PlanError, match="The optimizer kind 'sgd-momentum' was given"):
        Optimizer(kind="sgd-momentum")


@pytest.mark.parametrize(
    ("exchange", "message"),
    [
        ({"zero": 3, "shard_size": 3}, "shard size of 3 was given for 4 replicas; expected a divisor"),
        ({"zero": 3, "shard_size": 1}, "expected a shard size of at least 2"),
        ({"zero": 1, "shard_size": -2}, "expected a shard size of at least 2"),
        ({"shard_size": 2}, "with ZeRO 0; expected a shard size of at least 2, with ZeRO 1 to 3"),
    ],
)
def test_groups_of_replicas_that_share(exchange, message):
    plan = replace(
        PLAN,
        stages=(StagePlan(start=0, stop=2, ranks=(0, 1, 2, 3)),),
        num_microbatches=4,
        schedule="1f1b",
        schedule_hash="",
        exchange=GradientExchange(),
        sharding=UNSHARDED,
    )
    with pytest.raises(PlanError, match=message):
        replace(plan, exchange=GradientExchange(**exchange))


def test_neighbours_share_and_the_same_places_sum():
    exchange, ranks = GradientExchange(zero=1, shard_size=2), (7, 1, 4, 2)
    assert exchange.shard_groups(ranks) == ((7, 1), (4, 2))
    assert exchange.replicating_groups(ranks) == ((7, 4), (1, 2))
    assert GradientExchange(zero=1).shard_groups(ranks) == (ranks,)
    assert exchange.shard_groups((3,)) == ((3,),)
    assert [GradientExchange(zero=zero, shard_size=2 if zero else 0).num_parts(6) for zero in (0, 1, 3)] == [1, 2, 2]


def test_workloads():
    assert [Optimizer(kind=kind, momentum=m).num_states for kind in ("sgd", "adamw") for m in (False, True)] == [
        0,
        1,
        2,
        2,
    ]
    with pytest.raises(PlanError, match="at least 1"):
        Workload(global_batch=0)
    with pytest.raises(PlanError, match="at least 1 byte"):
        GradientExchange(bucket_bytes=0)


def test_devices_that_take_no_part_are_not_counted():
    graph = chain_graph(4)
    plan = replace(make_plan(graph, even_bounds(4, 2), (1, 1), 4), idle=(0, 2))
    assert plan.devices == (1, 3)
    assert "2 devices left out" in plan.describe()
    cluster = load_cluster("2x2xA100")
    check_plan(plan, graph, cluster)
    assert devices_per_node(plan, cluster) == {0: (1,), 1: (1,)}
    assert visible_devices(plan, cluster) == ["1", "1"]
    assert visible_devices(replace(plan, idle=()), cluster) == []
    left = used_of(plan, cluster)
    assert [left.node_index(rank) for rank in range(left.num_ranks)] == [0, 1]
    with pytest.raises(PlanError, match="uses 2 devices and leaves out \\[0, 2\\], but cluster '3xA100' has 3"):
        check_plan(plan, graph, load_cluster("3xA100"))
    with pytest.raises(PlanError, match="leaves out \\[0, 9\\]"):
        check_plan(replace(plan, idle=(0, 9)), graph, cluster)


@pytest.mark.parametrize("idle", [(1, 0), (1, 1), (-1, 1)])
def test_devices_that_are_left_out_stand_in_order(idle):
    plan = make_plan(chain_graph(4), even_bounds(4, 2), (1, 1), 4)
    with pytest.raises(
        PlanError, match=r"devices to leave out .`idle`. are .*; expected numbers of devices of the cluster, ascending"
    ):
        replace(plan, idle=idle)
