"""Plans whose layers are compiled: buckets leave at the ends of units; split backwards stay eager."""

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.program import build_program, gradient_buckets, lower_plan
from meshwright.simulator import estimate_program, simulate_plan
from meshwright.spec import (
    GradientExchange,
    Plan,
    StagePlan,
    Workload,
    compiled_units,
    load_shipped_graph,
)
from tests.simulator.plans import fast_cluster

GRAPH = load_shipped_graph("gpt2-small")
CLUSTER = fast_cluster("2xH100")


def plan_of(ranks=((0, 1),), schedule="1f1b", **settings):
    count = len(GRAPH.layers)
    bounds = [count * place // len(ranks) for place in range(len(ranks) + 1)]
    return Plan(
        model="gpt2-small",
        graph_hash=GRAPH.content_hash,
        cluster="2xH100",
        workload=Workload(global_batch=16, precision="amp"),
        stages=tuple(
            StagePlan(start=bounds[place], stop=bounds[place + 1], ranks=own) for place, own in enumerate(ranks)
        ),
        num_microbatches=4,
        schedule=schedule,
        **settings,
    )


def test_a_bucket_is_ready_when_the_unit_of_its_last_gradient_is_through():
    plan, graph = lower_plan(plan_of(compiled=True, exchange=GradientExchange(bucket_bytes=2**22)), GRAPH)
    program = build_program(plan, graph)
    cost = CostModel(cluster=CLUSTER, precision="amp")
    costs = estimate_program(program, plan, graph, cost)
    ops = cost.estimate_ops(graph, plan.microbatch_size, CLUSTER.device_kind(0))
    first = {i: op for op in reversed(range(len(graph.ops))) for i in graph.ops[op].inputs}
    starts = [start for start, _ in compiled_units(graph)]
    buckets = {bucket.index: bucket for bucket in gradient_buckets(graph, plan)}
    later = ops.backward_s + ops.accumulate_s
    filled, latest = {}, 0.0
    for index in sorted(buckets):
        unit = max(start for start in starts if start <= min(first[i] for i in buckets[index].parameters))
        latest = max(latest, float(later[unit:].sum()))
        filled[index] = latest
    section = program.body
    assert len(section.mark_index) > len(starts)
    for mark, bucket in enumerate(section.mark_index.tolist()):
        assert costs.body.mark_offset_ps[mark] == pytest.approx(filled[bucket] * 1e12, rel=1e-9)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_split_backwards_stay_eager(schedule):
    ranks = ((0,), (1,))
    eager, compiled = (simulate_plan(plan_of(ranks, schedule, compiled=each), GRAPH, CLUSTER) for each in (False, True))
    assert compiled.step_time_s == eager.step_time_s
    whole = plan_of(ranks, compiled=True)
    assert (
        simulate_plan(whole, GRAPH, CLUSTER).step_time_s
        < simulate_plan(replace(whole, compiled=False), GRAPH, CLUSTER).step_time_s
    )


def test_compiled_or_not_it_is_the_same_graph_and_fits_the_same_plan():
    local, graph = lower_plan(plan_of(compiled=True), GRAPH)
    assert graph.compiled == 1
    assert graph.content_hash == GRAPH.content_hash == local.graph_hash
    assert not local.compiled
    # Few layers of a stage with replicas are cut into parts.
    few = replace(plan_of(compiled=True), stages=(replace(plan_of().stages[0], stop=3),))
    assert (
        lower_plan(replace(few, stages=(*few.stages, StagePlan(start=3, stop=14, ranks=(2, 3)))), GRAPH)[1].compiled
        == 3
    )
