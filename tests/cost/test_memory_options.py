"""Sharding, computing again and moving away: closed forms on real graphs, and against the walk through all ops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.memory import MemoryOptions, find_peak, trace_step, weigh_rank, weigh_stage
from meshwright.spec import (
    Link,
    Optimizer,
    PlanError,
    Workload,
    load_shipped_graph,
    recompute_layers,
    slice_graph,
    with_recompute,
)

GPT, MIXTRAL = load_shipped_graph("gpt-tiny"), load_shipped_graph("mixtral-tiny")
WORK = Workload(global_batch=8, optimizer=Optimizer(kind="adamw"))
MIXED = Workload(global_batch=8, optimizer=Optimizer(kind="adamw"), precision="mixed-bf16-gradients")


def weigh(graph, workload=WORK, stage=0, bounds=None, num_in_flight=1, num_microbatches=1, **options):
    stages = slice_graph(graph, bounds or [(0, len(graph.layers))])
    return weigh_rank(
        graph,
        stages[stage],
        2,
        workload,
        MemoryOptions(**options),
        num_in_flight=num_in_flight,
        num_microbatches=num_microbatches,
    )


@pytest.mark.parametrize("graph", [GPT, MIXTRAL])
@pytest.mark.parametrize("stage", [0, 1])
def test_without_options_it_is_the_stage(graph, stage):
    bounds = [(0, 2), (2, len(graph.layers))]
    found = weigh(graph, stage=stage, bounds=bounds, num_in_flight=3)
    plain = weigh_stage(graph, slice_graph(graph, bounds)[stage], 2, WORK)
    counters = 4 * sum(graph.tensors[i].requires_grad for i in slice_graph(graph, bounds)[stage].parameters)
    assert found.device_bytes == plain.peak_bytes(3) - counters
    assert found.host_bytes == found.nvme_bytes == found.host_moved_bytes == found.nvme_moved_bytes == 0


@given(ranks=st.sampled_from([1, 2, 4, 8]))
def test_zero_shards_what_its_stage_says(ranks):
    # Mixed precision: 2 bytes of parameter, 2 of gradient, 12 of master weight and states (ZeRO, section 5).
    psi = GPT.num_parameters()
    by_stage = [weigh(GPT, MIXED, num_ranks=ranks, zero=zero) for zero in range(4)]
    assert [item.parameter_bytes for item in by_stage[:3]] == [2 * psi] * 3
    assert [item.gradient_bytes for item in by_stage[:2]] == [2 * psi] * 2
    assert by_stage[0].optimizer_bytes == 12 * psi
    assert all(item.optimizer_bytes == pytest.approx(12 * psi / ranks, rel=1e-3) for item in by_stage[1:3])
    # Shards of gradients are in float32, and those of the weights are the master weights.
    assert by_stage[3].optimizer_bytes == pytest.approx(8 * psi / ranks, rel=1e-3)
    layer = by_stage[2].gradient_bytes - 4 * psi / ranks
    assert by_stage[3].parameter_bytes - 4 * psi / ranks == pytest.approx(2 * layer, rel=1e-2)
    # The largest layer of this model is the block with its 4·h² + 8·h² of weights.
    assert layer == pytest.approx(2 * 12 * 128**2, rel=0.02)


def test_experts_are_counted_as_such():
    experts = sum(
        tensor.num_elements(0)
        for tensor in MIXTRAL.tensors
        if tensor.role == "parameter" and ".experts." in tensor.name
    )
    assert 0.5 < experts / MIXTRAL.num_parameters() < 1
    whole, shared = weigh(MIXTRAL), weigh(MIXTRAL, num_ranks=4, num_expert_ranks=4)
    assert whole.parameter_bytes - shared.parameter_bytes == 4 * experts * 3 // 4
    assert whole.gradient_bytes - shared.gradient_bytes == 4 * experts * 3 // 4
    assert weigh(MIXTRAL, num_ranks=4, num_expert_ranks=4, zero=1).optimizer_bytes == pytest.approx(
        8 * MIXTRAL.num_parameters() / 4, rel=1e-3
    )


def test_recomputing_keeps_what_ranges_read():
    blocks = recompute_layers(GPT, range(1, 5))
    recomputed = with_recompute(GPT, blocks)
    plain, again = weigh(GPT, num_in_flight=4), weigh(recomputed, num_in_flight=4)
    value = 2 * 128 * 128 * 4
    inside = plain.activation_bytes - again.activation_bytes
    # Three quarters of the four microbatches' blocks, less their inputs, are gone; one block's inside is there once.
    assert 0.8 < inside / plain.activation_bytes < 1
    walked = [find_peak(trace_step(graph, Workload(global_batch=2))) for graph in (GPT, recomputed)]
    one = [weigh(graph).activation_bytes for graph in (GPT, recomputed)]
    # Both ways of counting agree on what recomputing saves, but for some values while one op computes.
    saved_by_walking = walked[0].parts["saved activations"] + walked[0].parts["workspace"]
    saved_by_walking -= walked[1].parts["saved activations"] + walked[1].parts["workspace"]
    assert one[0] - one[1] == pytest.approx(saved_by_walking, abs=6 * 4 * value)


def test_what_is_moved_away_is_held_elsewhere_and_travels():
    here = weigh(GPT, MIXED, num_ranks=2, zero=1)
    host = weigh(GPT, MIXED, num_ranks=2, zero=1, states_on="host")
    disk = weigh(GPT, MIXED, num_ranks=2, zero=1, states_on="nvme")
    assert here.device_bytes - host.device_bytes == host.host_bytes == disk.nvme_bytes == here.optimizer_bytes
    # 2 bytes of gradient down and 2 of parameter up for each element of the share.
    assert host.host_moved_bytes == disk.host_moved_bytes == pytest.approx(4 * GPT.num_parameters() / 2, rel=1e-3)
    assert disk.nvme_moved_bytes == 2 * disk.nvme_bytes
    pcie = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    assert host.moving_seconds(pcie) == pytest.approx(host.host_moved_bytes / 1e9)
    assert disk.moving_seconds(pcie, 1e8) - host.moving_seconds(pcie) == pytest.approx(disk.nvme_moved_bytes / 1e8)
    with pytest.raises(PlanError, match="bandwidth"):
        disk.moving_seconds(pcie)
    assert here.moving_seconds(pcie) == 0.0


def test_activations_on_the_host_come_back():
    here = weigh(GPT, num_in_flight=4, num_microbatches=8)
    away = weigh(GPT, num_in_flight=4, num_microbatches=8, activations_on="host")
    assert here.device_bytes - away.device_bytes == away.host_bytes > 0.5 * here.activation_bytes
    kept = weigh_stage(GPT, slice_graph(GPT, [(0, len(GPT.layers))])[0], 2, WORK).saved_bytes
    assert away.host_moved_bytes == 2 * 8 * kept


@pytest.mark.parametrize(("ranks", "experts"), [(0, 1), (4, 3), (2, 4), (1, 0)])
def test_ranks_that_do_not_divide_are_refused(ranks, experts):
    with pytest.raises(PlanError, match="a divisor of the first"):
        MemoryOptions(num_ranks=ranks, num_expert_ranks=experts)
