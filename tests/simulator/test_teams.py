"""Plans that split ops over teams, and that compute again: step times and memory by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.program import lower_graph
from meshwright.simulator import form_teams, simulate_plan
from meshwright.spec import PlanError, computed_again, load_cluster, load_shipped_graph, read_recompute
from meshwright.spec.sharding import Sharding
from tests.graphs import make_plan

GPT = load_shipped_graph("gpt-tiny")
LAYERS = len(GPT.layers)
CLUSTER = load_cluster("2x8xA100")


def one_stage(replicas, **settings):
    return replace(make_plan(GPT, [(0, LAYERS)], [replicas], replicas), **settings)


@pytest.mark.parametrize(
    "sharding", [Sharding(tensor=4), Sharding(tensor=2, sequence_parallel=True), Sharding(context=2)]
)
def test_a_step_of_one_team_is_the_sum_of_its_ops(sharding):
    plan = one_stage(1, sharding=sharding)
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    local = lower_graph(GPT, sharding, ())
    teams = cost.for_teams(sharding)
    prices = teams.price_ops(local, plan.microbatch_size, CLUSTER.device_kind(0))
    optimizer_s = teams.optimizer_seconds(local, local.parameters, plan.workload.optimizer, CLUSTER.device_kind(0))
    summed = sum(local.tensors[item.tensor].num_bytes(1, 4) for item in local.collectives if item.phase == "step")
    size, axis_ranks = sharding.width, tuple(range(sharding.width))
    beside = [tuple(range(k, k + size)) for k in range(size, 8, size)]
    exchange_s = cost.collective_seconds("all_reduce", axis_ranks, summed, beside) if summed else 0.0
    found = simulate_plan(plan, GPT, CLUSTER, cost=cost)
    expected = prices.forward_s.sum() + prices.backward_s.sum() + optimizer_s + exchange_s
    assert found.step_time_s == pytest.approx(expected, rel=1e-9)
    assert len(found.ranks) == 1


def test_what_is_computed_again_takes_its_forward_once_more_and_leaves_memory():
    again = read_recompute(GPT, "full")
    plain, full = one_stage(2), one_stage(2, recompute=again)
    cost = CostModel(cluster=CLUSTER, precision=plain.workload.precision)
    prices = cost.price_ops(GPT, plain.microbatch_size, CLUSTER.device_kind(0))
    more = sum(prices.forward_s[op] for start, stop in again for op in computed_again(GPT, start, stop))
    found = [simulate_plan(plan, GPT, CLUSTER, cost=cost) for plan in (plain, full)]
    assert found[1].step_time_s - found[0].step_time_s == pytest.approx(more, rel=1e-6)
    assert found[1].peak_memory_bytes[0] < found[0].peak_memory_bytes[0]


def test_utilisation_counts_the_model_once_and_the_work_as_often_as_it_is_done():
    plan = one_stage(2)
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    for settings in ({"sharding": Sharding(tensor=2)}, {"recompute": read_recompute(GPT, "full")}):
        found = simulate_plan(replace(plan, **settings), GPT, CLUSTER, cost=cost)
        devices = plan.num_ranks * settings.get("sharding", plan.sharding).width
        peak = CLUSTER.device_kind(0).peak_flops_per_s[plan.workload.precision]
        flops = plan.num_microbatches * GPT.flops(plan.microbatch_size)
        assert found.mfu == pytest.approx(flops / (found.step_time_s * devices * peak))
        assert found.hfu >= found.mfu * 0.999


def test_simulating_teams_is_simulating_what_they_are_lowered_to():
    plan = replace(
        make_plan(GPT, [(0, 2), (2, LAYERS)], [2, 2], 8),
        sharding=Sharding(tensor=2, sequence_parallel=True),
        recompute=read_recompute(GPT, "0:3"),
    )
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    whole = simulate_plan(plan, GPT, CLUSTER, cost=cost)
    lowered = simulate_plan(*form_teams(plan, GPT, CLUSTER, cost)[:3], cost=form_teams(plan, GPT, CLUSTER, cost).cost)
    assert whole.timeline == lowered.timeline
    assert whole.step_time_s == lowered.step_time_s


def test_more_replicas_than_devices_are_refused():
    with pytest.raises(PlanError, match="32 devices"):
        simulate_plan(one_stage(8, sharding=Sharding(tensor=4)), GPT, CLUSTER)
