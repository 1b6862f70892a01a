"""Plans that split ops over teams, and that compute again: step times and memory by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.program import lower_graph
from meshwright.simulator import form_teams, simulate_plan
from meshwright.simulator.stage_costs import stage_costs
from meshwright.simulator.state_shards import StateShards, gather_waits
from meshwright.spec import (
    GradientExchange,
    PlanError,
    Sharding,
    computed_again,
    load_shipped_graph,
    read_recompute,
    slice_graph,
)
from meshwright.spec.memory import MEMORY_PARTS, PARAMETERS
from tests.graphs import make_plan
from tests.simulator.plans import fast_cluster

GPT = load_shipped_graph("gpt-tiny")
MIXTRAL = load_shipped_graph("mixtral-tiny")
LAYERS = len(GPT.layers)
CLUSTER = fast_cluster("2x8xA100")


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
    costs = teams.estimate_ops(local, plan.microbatch_size, CLUSTER.device_kind(0))
    optimizer_s = teams.optimizer_seconds(local, local.parameters, plan.workload.optimizer, CLUSTER.device_kind(0))
    summed = sum(local.tensors[item.tensor].num_bytes(1, 4) for item in local.collectives if item.phase == "step")
    size, axis_ranks = sharding.width, tuple(range(sharding.width))
    beside = [tuple(range(k, k + size)) for k in range(size, 8, size)]
    exchange_s = cost.collective_seconds("all_reduce", axis_ranks, summed, beside) if summed else 0.0
    found = simulate_plan(plan, GPT, CLUSTER, cost=cost)
    expected = costs.forward_s.sum() + costs.backward_s.sum() + optimizer_s + exchange_s
    assert found.step_time_s == pytest.approx(expected, rel=1e-9)
    assert len(found.ranks) == 1
    silent = cost.estimate_ops(replace(local, collectives=()), plan.microbatch_size, CLUSTER.device_kind(0))
    computing = silent.forward_s.sum() + silent.backward_s.sum()
    inside = costs.forward_s.sum() + costs.backward_s.sum() - computing
    assert found.ranks[0].exchanged_inside_s == pytest.approx(inside, rel=1e-6)


@pytest.mark.parametrize(("sharding", "replicas"), [(Sharding(expert=4), 1), (Sharding(expert=2), 4)])
def test_experts_are_summed_where_they_are_held_alike(sharding, replicas):
    """By hand, nothing overlapped: what teams share goes over all devices, experts over one device of each team."""
    exchange = GradientExchange(overlap=False, bucket_bytes=1 << 30)
    plan = make_plan(MIXTRAL, [(0, len(MIXTRAL.layers))], [replicas], replicas)
    plan = replace(
        plan, sharding=sharding, exchange=exchange, workload=replace(plan.workload, global_batch=replicas * 8)
    )
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    local, teams, kind = lower_graph(MIXTRAL, sharding, ()), cost.for_teams(sharding), CLUSTER.device_kind(0)
    width, trained = plan.workload.float_bytes, {i for i in local.parameters if local.tensors[i].requires_grad}
    experts = {i for i in trained if local.tensors[i].shape != MIXTRAL.tensors[i].shape}
    assert {MIXTRAL.tensors[i].name.rsplit(".")[-1] for i in experts} == {"gate", "up", "down"}
    shared_bytes, expert_bytes = (
        sum(local.tensors[i].num_bytes(0, width) for i in ids) for ids in (trained - experts, experts)
    )
    costs = teams.estimate_ops(local, 8 // sharding.expert, kind)
    own = costs.forward_s.sum() + costs.backward_s.sum()
    own += teams.optimizer_seconds(local, local.parameters, plan.workload.optimizer, kind)
    num_devices = replicas * sharding.expert
    sums = cost.collective_seconds("all_reduce", tuple(range(num_devices)), shared_bytes)
    if replicas > 1:
        own += teams.bucket_seconds(local, local.parameters, kind)
        places = [tuple(range(place, num_devices, sharding.expert)) for place in range(sharding.expert)]
        sums += cost.collective_seconds("all_reduce", places[0], expert_bytes, places[1:])
    found = simulate_plan(plan, MIXTRAL, CLUSTER, cost=cost)
    assert found.step_time_s == pytest.approx(own + sums, rel=1e-9)
    assert found.samples_per_s == pytest.approx(replicas * 8 / found.step_time_s)
    flops = replicas * sharding.expert * MIXTRAL.flops(plan.microbatch_size)
    peak = num_devices * kind.peak_flops_per_s[plan.workload.precision]
    assert found.mfu == pytest.approx(flops / (found.step_time_s * peak))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_tokens_are_summed_once(zero):
    """Where replicas sum them, inside of passes or in buckets, the optimizer has nothing to sum before it."""
    spent = []
    for context in (1, 2):
        plan = one_stage(2, sharding=Sharding(context=context), exchange=GradientExchange(zero=zero))
        spent.append(simulate_plan(plan, GPT, CLUSTER).ranks[0].optimizer_s)
    assert spent[1] == pytest.approx(spent[0], rel=1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotingCost(CostModel):
    """Notes what collectives are asked for."""

    asked: list = field(default_factory=list)

    def collective_seconds(self, op, ranks, num_bytes, concurrent=(), algorithm=None, axes=()):
        self.asked.append((op, ranks, axes))
        return 0.0


def test_parameters_are_gathered_from_replicas_and_gradients_summed_by_all_that_hold_them():
    """Experts are computed alike on all ranks of the context axis, so only replicas have others of their gradients."""
    sharding = Sharding(context=2, expert=2)
    local = lower_graph(MIXTRAL, sharding, ())
    cost = NotingCost(cluster=CLUSTER).for_teams(sharding)
    (stage,) = slice_graph(local, [(0, len(local.layers))])
    nothing = np.zeros(len(stage.ops))
    gather_waits(local, stage, nothing, nothing, StateShards(3, (0, 1), ()), CLUSTER.device_kind(0), cost)
    over = {op: {axes for asked, _, axes in cost.asked if asked == op} for op in ("all_gather", "reduce_scatter")}
    assert over == {"all_gather": {()}, "reduce_scatter": {("context", "expert"), ()}}


@pytest.mark.parametrize("on_host", [False, True])
def test_a_team_alone_sums_gradients_of_tokens_once(on_host):
    """In passes where parameters come from the host, else before the step."""
    sharding = Sharding(context=2)
    local, kind = lower_graph(GPT, sharding, ()), CLUSTER.device_kind(0)
    plan = one_stage(1, exchange=GradientExchange(zero=3))
    (stage,) = slice_graph(local, plan.bounds)
    shards = StateShards(3, (0,), (), on_host)
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision).for_teams(sharding)
    costs = stage_costs(local, plan, stage, (), kind, cost, shards)
    own_s = cost.optimizer_seconds(local, stage.parameters, plan.workload.optimizer, kind)
    assert (costs.optimizer_s > own_s * (1 + 1e-9)) == (not on_host)
    assert (costs.exchanged_s[1] > stage_costs(local, plan, stage, (), kind, cost).exchanged_s[1]) == on_host


def test_a_team_sums_what_it_shares_with_no_other_stage_alone():
    """Two stages of one team each with a tied table: that is summed by both, everything else by each for itself."""
    plan = replace(make_plan(GPT, [(0, 3), (3, LAYERS)], [1, 1], 2), sharding=Sharding(context=2))
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    local, kind = lower_graph(GPT, plan.sharding, ()), CLUSTER.device_kind(0)
    teams, stages = cost.for_teams(plan.sharding), slice_graph(local, plan.bounds)
    (tied,) = set(stages[0].parameters) & set(stages[1].parameters)
    beside = [(k, k + 1) for k in range(2, 8, 2)]
    found = simulate_plan(plan, GPT, CLUSTER, cost=cost)
    for stage, rank in zip(stages, found.ranks, strict=True):
        own_bytes = sum(local.tensors[i].num_bytes(0, 4) for i in stage.parameters if i != tied)
        expected = teams.optimizer_seconds(local, stage.parameters, plan.workload.optimizer, kind)
        expected += cost.collective_seconds("all_reduce", (0, 1), own_bytes, beside)
        assert rank.optimizer_s == pytest.approx(expected, rel=1e-6)


def test_experts_that_are_laid_out_take_the_room_of_their_part():
    plan = make_plan(MIXTRAL, [(0, len(MIXTRAL.layers))], [1], 1)
    held = []
    for size in (1, 2, 4):
        workload = replace(plan.workload, global_batch=4 * size)
        split = replace(plan, sharding=Sharding(expert=size), workload=workload)
        found = simulate_plan(split, MIXTRAL, CLUSTER)
        held.append(found.memory[0].parts[MEMORY_PARTS[PARAMETERS]])
    experts = sum(
        MIXTRAL.tensors[i].num_bytes(0, 4)
        for i in MIXTRAL.parameters
        if MIXTRAL.tensors[i].name.rsplit(".")[-1] in ("gate", "up", "down")
    )
    assert held[0] - held[1] == experts // 2
    assert held[0] - held[2] == experts * 3 // 4


@pytest.mark.parametrize("size", [2, 4])
def test_samples_that_expert_ranks_do_not_divide_are_refused(size):
    plan = make_plan(MIXTRAL, [(0, len(MIXTRAL.layers))], [1], 1)
    with pytest.raises(PlanError, match=f"microbatches for each of {size} expert ranks"):
        replace(plan, sharding=Sharding(expert=size), workload=replace(plan.workload, global_batch=7))


def test_what_is_computed_again_takes_its_forward_once_more_and_leaves_memory():
    again = read_recompute(GPT, "full").ranges
    plain, full = one_stage(2), one_stage(2, recompute=again)
    cost = CostModel(cluster=CLUSTER, precision=plain.workload.precision)
    costs = cost.estimate_ops(GPT, plain.microbatch_size, CLUSTER.device_kind(0))
    more = sum(costs.forward_s[op] for start, stop in again for op in computed_again(GPT, start, stop))
    found = [simulate_plan(plan, GPT, CLUSTER, cost=cost) for plan in (plain, full)]
    assert found[1].step_time_s - found[0].step_time_s == pytest.approx(more, rel=1e-6)
    assert found[1].peak_memory_bytes[0] < found[0].peak_memory_bytes[0]


def test_utilisation_counts_the_model_once_and_the_work_as_often_as_it_is_done():
    plan = one_stage(2)
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    for settings in ({"sharding": Sharding(tensor=2)}, {"recompute": read_recompute(GPT, "full").ranges}):
        found = simulate_plan(replace(plan, **settings), GPT, CLUSTER, cost=cost)
        devices = plan.num_ranks * settings.get("sharding", plan.sharding).width
        peak = CLUSTER.device_kind(0).peak_flops_per_s[plan.workload.precision]
        flops = plan.num_microbatches * GPT.flops(plan.microbatch_size)
        assert found.mfu == pytest.approx(flops / (found.step_time_s * devices * peak))
        assert found.hfu >= found.mfu * 0.999


def test_what_every_rank_computes_alike_is_no_use_of_the_model():
    """Most of a ResNet stays whole on the tensor axis: the hardware is used for it, the model is not."""
    graph = load_shipped_graph("resnet50")
    plan = replace(make_plan(graph, [(0, len(graph.layers))], [2], 2), sharding=Sharding(tensor=4))
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    whole = simulate_plan(plan, graph, CLUSTER, cost=cost)
    teams = form_teams(plan, graph, CLUSTER, cost)
    lowered = simulate_plan(teams.plan, teams.graph, teams.cluster, cost=teams.cost)
    peak = CLUSTER.device_kind(0).peak_flops_per_s[plan.workload.precision]
    flops = plan.num_microbatches * graph.flops(plan.microbatch_size)
    assert whole.mfu == lowered.mfu == pytest.approx(flops / (whole.step_time_s * 8 * peak))
    assert lowered.hfu > 1.2 * lowered.mfu


def test_simulating_teams_is_simulating_what_they_are_lowered_to():
    plan = replace(
        make_plan(GPT, [(0, 2), (2, LAYERS)], [2, 2], 8),
        sharding=Sharding(tensor=2, sequence_parallel=True),
        recompute=read_recompute(GPT, "0:3").ranges,
    )
    cost = CostModel(cluster=CLUSTER, precision=plan.workload.precision)
    whole = simulate_plan(plan, GPT, CLUSTER, cost=cost)
    lowered = simulate_plan(*form_teams(plan, GPT, CLUSTER, cost)[:3], cost=form_teams(plan, GPT, CLUSTER, cost).cost)
    assert whole.timeline == lowered.timeline
    assert whole.step_time_s == lowered.step_time_s


def test_more_replicas_than_devices_are_refused():
    with pytest.raises(PlanError, match="32 devices"):
        simulate_plan(one_stage(8, sharding=Sharding(tensor=4)), GPT, CLUSTER)
