"""The op list, the pipeline and the prices of a training step, against closed forms and a tiny simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.collectives import Group, place_group
from meshwright.cost.collectives.algorithms import ring_seconds
from meshwright.cost.collectives.shipped import load_shipped
from meshwright.cost.memory import predict_device_peak
from meshwright.cost.parameters import count_parameters, layer_parameters
from meshwright.cost.residual import ResidualShape
from meshwright.cost.roofline import LAUNCH_S
from meshwright.cost.steps import (
    Efficiencies,
    StageSeconds,
    StepPrices,
    embedding_ops,
    find_software,
    fit_efficiencies,
    head_ops,
    layer_ops,
    pipeline_seconds,
    predict_layer,
    predict_step,
    recomputed_ops,
    residual_ops,
)
from meshwright.cost.steps.pacing import count_kernels, paced
from meshwright.cost.steps.prices import NETWORK_SHARE
from meshwright.cost.transformer import Experts, TrainingSetup, TransformerError, TransformerShape, layers_of_stage
from meshwright.spec import load_cluster
from tests.cost.pipelines import follow_1f1b

GPT = TransformerShape(
    layers=24, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, vocab=51200, max_positions=1024
)
SETUP = TrainingSetup(seq=1024, microbatch_size=4, num_microbatches=8, fused_attention=False, precision="fp16")
WHOLE = Efficiencies(product=1.0, memory=1.0, host_s=0.0)
MEGATRON = find_software("Megatron-LM", "2205.05198")


def prices(setup, efficiencies=WHOLE, kind="8xA100"):
    cluster = load_cluster(kind)
    return StepPrices(kind=cluster.device_kinds[0], node=cluster.nodes[0], setup=setup, efficiencies=efficiencies)


@given(
    layers=st.integers(1, 40),
    hidden=st.sampled_from([1024, 2048, 4096]),
    vocab=st.sampled_from([32000, 51200]),
    seq=st.sampled_from([1024, 2048]),
    tp=st.sampled_from([1, 2, 4, 8]),
    microbatch=st.integers(1, 8),
)
def test_flops_are_those_of_megatron(layers, hidden, vocab, seq, tp, microbatch):
    shape = replace(GPT, layers=layers, hidden=hidden, head_dim=hidden // 16, ffn=4 * hidden, vocab=vocab)
    setup = replace(SETUP, seq=seq, microbatch_size=microbatch, tp=tp)
    ops = layer_ops(shape, setup, 0)
    layer = sum(op.count * op.flops for op in (*ops, *recomputed_ops(ops, "full")))
    head = sum(op.count * op.flops for op in head_ops(shape, setup))
    counted = tp * (layers * layer + head)
    # Narayanan et al., SC 2021, equation 3, with B = one microbatch.
    b, s, h, v = microbatch, seq, hidden, vocab
    expected = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert counted == pytest.approx(expected, rel=1e-12)


def test_selective_recompute_runs_the_core_alone():
    ops = layer_ops(GPT, SETUP, 0)
    again = recomputed_ops(ops, "selective")
    assert {op.name for op in again} == {"scores", "softmax", "attention dropout", "values"}
    # Korthikanti et al., section 5: 4·b·s²·h of the forward's FLOPs.
    assert sum(op.flops for op in again) == 4 * 4 * 1024**2 * 2048
    assert recomputed_ops(ops, "none") == ()


def test_experts_compute_what_their_tokens_take():
    experts = Experts(num_experts=64, top_k=6, ffn=1408, num_shared=2, num_dense_layers=1)
    shape = replace(GPT, experts=experts, gated=True)
    dense, routed = (
        sum(
            op.count * op.flops
            for op in layer_ops(shape, SETUP, layer)
            if op.name in ("up", "down") and op.part == "forward"
        )
        for layer in (0, 1)
    )
    tokens = 4 * 1024
    assert dense == 2 * tokens * 2048 * 3 * 8192
    assert routed == pytest.approx(2 * tokens * 2048 * 3 * 1408 * (6 + 2), rel=1e-3)
    spread = replace(SETUP, dp=8, ep=8)
    assert any(op.op == "all_to_all" for op in layer_ops(shape, spread, 1))
    assert not any(op.op == "all_to_all" for op in layer_ops(shape, spread, 0))


@given(
    num_stages=st.integers(1, 6),
    num_microbatches=st.integers(1, 12),
    forward=st.floats(0.1, 10),
    backward=st.floats(0.1, 10),
)
def test_closed_form_is_1f1b_of_equal_stages(num_stages, num_microbatches, forward, backward):
    stage = StageSeconds(forward_s=forward, input_gradient_s=backward, weight_gradient_s=0.0)
    expected = follow_1f1b([stage] * num_stages, num_microbatches)
    assert pipeline_seconds([stage] * num_stages, num_microbatches) == pytest.approx(expected, rel=1e-9)


@given(seconds=st.lists(st.floats(0.5, 2), min_size=1, max_size=5), num_microbatches=st.integers(1, 12))
def test_closed_form_is_near_1f1b_of_unequal_stages(seconds, num_microbatches):
    stages = [StageSeconds(forward_s=s, input_gradient_s=2 * s, weight_gradient_s=0.0) for s in seconds]
    expected = follow_1f1b(stages, num_microbatches)
    closed = pipeline_seconds(stages, num_microbatches)
    # The slowest stage's work, and every other stage once, can only be shortened by what overlaps at the ends.
    assert closed == pytest.approx(expected, rel=0.25)
    assert expected >= num_microbatches * 3 * max(seconds) * (1 - 1e-9)


@given(num_stages=st.integers(2, 16), num_microbatches=st.integers(1, 64), chunks=st.integers(1, 4))
def test_bubble_is_that_of_interleaving(num_stages, num_microbatches, chunks):
    stage = StageSeconds(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0)
    seconds = pipeline_seconds([stage] * num_stages, num_microbatches, "interleaved", chunks)
    work = 3.0 * num_microbatches
    assert (seconds - work) / work == pytest.approx((num_stages - 1) / (chunks * num_microbatches))


# Qi et al., ICLR 2024, Table 5: stages, microbatches, profiled times (ms), and the bubble rates of 1F1B and ZB-1p.
@pytest.mark.parametrize(
    ("stages", "microbatches", "times", "one_f_one_b", "zb_1p"),
    [
        (8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1585),
        (8, 64, (18.522, 18.086, 9.337, 0.601), 0.124, 0.0674),
        (16, 48, (11.347, 11.248, 8.132, 0.377), 0.2552, 0.1397),
        (32, 256, (10.419, 10.207, 7.715, 0.408), 0.1352, 0.0594),
    ],
)
def test_bubble_rates_are_near_those_of_zero_bubble(stages, microbatches, times, one_f_one_b, zb_1p):
    forward, inputs, weights, transfer = times
    work = microbatches * (forward + inputs + weights)
    stage = StageSeconds(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights, transfer_s=2 * transfer)
    for schedule, expected in (("1f1b", one_f_one_b), ("zb-1p", zb_1p)):
        seconds = pipeline_seconds([stage] * stages, microbatches, schedule)
        # The closed form lets every microbatch wait for its two messages; an event simulation hides some of them.
        assert 1 - work / seconds == pytest.approx(expected, abs=0.03)
    assert pipeline_seconds([stage] * stages, microbatches, "zb-2p") == pytest.approx(microbatches * stage.seconds)


@given(num_layers=st.integers(1, 200), num_stages=st.integers(1, 64))
def test_layers_are_spread_evenly(num_layers, num_stages):
    if num_layers < num_stages:
        with pytest.raises(TransformerError, match="at least one layer each"):
            counts_of(num_layers, num_stages)
        return
    counts = counts_of(num_layers, num_stages)
    assert sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1


def test_the_last_and_the_first_stage_have_fewer_layers():
    assert counts_of(22, 8) == [2, 3, 3, 3, 3, 3, 3, 2]  # Qi et al., 2024, section 5.1
    assert counts_of(126, 8)[0] == counts_of(126, 8)[-1] == 15
    assert counts_of(7, 5) == [1, 2, 2, 1, 1]


def counts_of(num_layers, num_stages):
    shape, setup = replace(GPT, layers=num_layers), replace(SETUP, pp=num_stages)
    return [len(layers_of_stage(shape, setup, stage)) for stage in range(num_stages)]


@pytest.mark.parametrize("experts", [None, Experts(num_experts=8, top_k=2, ffn=2048, num_shared=1, num_dense_layers=1)])
@pytest.mark.parametrize("tp", [1, 4])
def test_parameters_are_the_matrices_that_the_ops_multiply_by(experts, tp):
    shape, setup = (
        replace(GPT, experts=experts, gated=True, biased=False),
        replace(SETUP, tp=tp, dp=4, ep=4 if experts else 1),
    )
    for layer in (0, 5):
        sizes = [
            (op.count, dict(op.sizes)) for op in layer_ops(shape, setup, layer) if op.weighted and op.part == "forward"
        ]
        multiplied = sum(count * size["n"] * size["k"] for count, size in sizes)
        assert layer_parameters(shape, setup, layer) == multiplied + 2 * shape.hidden  # two norms


@pytest.mark.parametrize("zero", [0, 2])
def test_a_step_updates_the_parameters_that_memory_counts(zero):
    # 7 layers over 5 stages: the fullest stage is one of the middle for the optimizer, as for memory.
    shape, setup = replace(GPT, layers=7), replace(SETUP, pp=5, zero=zero)
    fullest = max(count_parameters(shape, setup, stage).dense for stage in range(5))
    at = prices(setup)
    copies = 0 if zero else 22
    longest = max(stage.optimizer_s for stage in predict_step(shape, at, MEGATRON).stages)
    assert longest == pytest.approx(at.pass_seconds(fullest * (40 + copies)))


@pytest.mark.parametrize(
    ("experts", "changes", "told"),
    [
        (8, {"dp": 16, "ep": 16}, "8 experts cannot be laid out over ep = 16"),
        (8, {"dp": 3, "ep": 3}, "8 experts cannot be laid out over ep = 3"),
        (0, {"dp": 2, "ep": 2}, "No experts cannot be laid out"),
        (0, {"tp": 3}, "16 heads cannot be split over tp = 3"),
        (0, {"pp": 25}, "24 layers cannot be split over pp = 25"),
    ],
)
def test_layouts_that_cannot_be_are_refused(experts, changes, told):
    shape = replace(GPT, experts=Experts(num_experts=experts, top_k=2, ffn=2048) if experts else None)
    setup = replace(SETUP, **changes)
    with pytest.raises(TransformerError, match=told):
        predict_step(shape, prices(setup), MEGATRON)
    with pytest.raises(TransformerError, match=told):
        predict_device_peak(shape, setup, "megatron", fused_loss=False)


@given(num_ranks=st.sampled_from([2, 4, 8, 16]), num_bytes=st.integers(1, 2**32))
def test_a_group_over_links_that_nobody_measured_is_a_ring(num_ranks, num_bytes):
    at = prices(replace(SETUP, tp=num_ranks), kind="16xA100")
    slow = replace(at.node, device_link=replace(at.node.device_link, bandwidth_bytes_per_s=100e9))
    seconds = replace(at, node=slow).collective_seconds("tensor", "all_reduce", num_bytes)
    assert seconds == pytest.approx(ring_seconds(num_ranks, num_bytes, 3.4e-6, NETWORK_SHARE * 100e9), rel=1e-9)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_group_within_a_measured_node_takes_what_was_measured(op, num_ranks):
    sizes = np.array([2.0**20, 2.0**26])
    model = next(kind.model for kind in load_shipped().kinds if kind.model.device == "A100")
    expected = model.predict(op, Group(num_ranks=num_ranks), sizes).seconds
    at = prices(replace(SETUP, tp=num_ranks))
    assert [at.collective_seconds("tensor", op, size) for size in sizes] == pytest.approx(expected.tolist())


# Eight NICs of 25 GB/s: of a node's eight devices all belong to the group, one, or four, the others to other groups.
@pytest.mark.parametrize(("tp", "dp", "bandwidth"), [(1, 16, 200e9), (8, 4, 25e9), (2, 32, 100e9)])
def test_a_group_across_nodes_has_its_share_of_the_nics(tp, dp, bandwidth):
    at = prices(replace(SETUP, tp=tp, dp=dp))
    small, large = (at.collective_seconds("data", "all_gather", size) for size in (0, 2**34))
    assert large - small == pytest.approx((dp - 1) / dp * 2**34 / (NETWORK_SHARE * bandwidth))
    assert small > 0


@pytest.mark.parametrize(("num_devices", "per_node"), [(8, 8), (16, 8), (32, 8), (16, 4)])
def test_groups_lie_where_their_ranks_do(num_devices, per_node):
    kind = f"{max(num_devices // per_node, 1)}x{per_node}xA100"
    cluster = load_cluster(kind)
    for tp, pp in ((2, 4), (1, 8), (4, 2), (2, 2)):
        setup = replace(SETUP, tp=tp, pp=pp, dp=num_devices // (tp * pp))
        priced, stage = prices(setup, kind=kind), num_devices // pp
        # the first and the last stage, however far they are from each other
        ends = (0, stage * (pp - 1))
        assert priced.place(2, ends[1]).num_nodes == place_group(cluster, ends).num_nodes
        data = [tuple(range(first, first + stage, tp)) for first in range(tp)]
        here, there = priced.place(setup.dp, tp), place_group(cluster, data[0], data)
        assert here.num_nodes == there.num_nodes
        if here.num_nodes > 1:
            assert here.num_sharing == there.num_sharing


def test_stages_on_other_nodes_are_reached_by_nics():
    near, far = (prices(replace(SETUP, tp=tp, pp=2)) for tp in (1, 8))
    assert near.collective_seconds("pipeline", "send", 2**30) == pytest.approx(3.4e-6 + 2**30 / (NETWORK_SHARE * 300e9))
    assert far.collective_seconds("pipeline", "send", 2**30) == pytest.approx(9.6e-6 + 2**30 / (NETWORK_SHARE * 25e9))


@pytest.mark.parametrize(
    "longer",
    [
        {"seq": 2048},
        {"microbatch_size": 8},
        {"num_microbatches": 9},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"dp": 64},
    ],
)
def test_more_work_takes_longer(longer):
    assert step(replace(SETUP, **longer)) > step(SETUP)


@pytest.mark.parametrize("worse", [{"product": 0.5}, {"memory": 0.5}, {"host_s": 1e-5}])
def test_worse_efficiency_takes_longer(worse):
    setup = replace(SETUP, tp=8)
    assert step(setup, replace(WHOLE, **worse)) > step(setup)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 4])
def test_a_step_is_never_below_its_flops(zero, pp):
    setup = replace(SETUP, zero=zero, pp=pp, dp=2)
    layer = sum(op.count * op.flops for op in layer_ops(GPT, setup, 0))
    assert step(setup) > setup.num_microbatches * GPT.layers / pp * layer / 312e12


def test_hidden_reductions_take_multiprocessors_from_the_products_beside_them():
    setup = replace(SETUP, tp=2, microbatch_size=16)
    shown = replace(MEGATRON, hidden_tensor_parallel=False)
    hidden, open_ = (predict_layer(GPT, prices(setup), software) for software in (MEGATRON, shown))
    reductions = 2 * prices(setup).collective_seconds("tensor", "all_reduce", 2 * setup.tokens * GPT.hidden)
    # All of it is shorter than the products; of an A100's 108 multiprocessors NCCL has 24.
    assert open_.input_gradient_s - hidden.input_gradient_s == pytest.approx((1 - 24 / 108) * reductions)
    assert open_.forward_s == hidden.forward_s


def test_software_is_found_by_framework_and_source():
    assert find_software("Megatron-LM", "Narayanan (arXiv 2104.04473)").name == "Megatron-LM of 2021"
    assert find_software("Megatron-LM 0.14", "somebody").fused_attention
    assert find_software("llm-foundry (Composer + PyTorch FSDP)").hides_gradients(4)
    assert find_software("a framework of next year").name == "any other"
    assert find_software("torchtitan FSDP2", "", "Async TP; seq 8192 default").async_tensor_parallel
    assert not find_software("torchtitan FSDP2", "", "vanilla TP").async_tensor_parallel
    bubble = find_software("Megatron-LM fork", "Qi et al. (arXiv 2401.10241)")
    assert not bubble.fused_attention
    assert [bubble.rolls(schedule) for schedule in ("1f1b", "interleaved", "zb-1p", "zb-2p")] == [
        False,
        False,
        True,
        True,
    ]
    assert [bubble.clips(schedule) for schedule in ("1f1b", "zb-1p")] == [True, False]
    assert [find_software("Alpa", "", notes).state_bytes for notes in ("", "Adafactor")] == [12, 4]


def test_attention_reaches_what_its_kernels_reach_alone():
    published = {"A100": 0.615, "H100": 0.35, "H200": 0.35, "B200": 0.55}
    for framework in ("a framework of next year", "Megatron-LM 0.14", "torchtitan FSDP2"):
        assert find_software(framework).attention_share == published
    # FlashAttention's first version, which on H100 is taken to lose as much to the second one as on A100.
    first = find_software("llm-foundry").attention_share
    assert first["H100"] / published["H100"] == pytest.approx(first["A100"] / published["A100"], rel=2e-3)
    assert {**first, "A100": 0.615, "H100": 0.35} == published


def test_fitting_finds_the_efficiencies_that_made_the_steps():
    true = Efficiencies(product=0.9, memory=0.8, host_s=4e-5)
    setups = [replace(SETUP, tp=tp, microbatch_size=size) for tp in (1, 2, 4, 8, 16) for size in (1, 2, 8)]
    predict = lambda tried: np.array([step(setup, tried) for setup in setups])
    found = fit_efficiencies(predict, predict(true), shares=np.full(len(setups), 20.0))
    assert found.product == pytest.approx(true.product, rel=0.02)
    assert found.memory == pytest.approx(true.memory, rel=0.02)
    assert found.host_s == pytest.approx(true.host_s, rel=0.02)


def test_rows_that_count_twice_pull_as_two():
    predict = lambda tried: np.array([step(replace(SETUP, microbatch_size=size), tried) for size in (1, 8)])
    measured = predict(WHOLE_OF_TWO) * [1.0, 1.3]
    one, two = (fit_efficiencies(predict, measured, shares=np.array(shares)) for shares in ([1.0, 1.0], [1.0, 9.0]))
    errors = [np.abs(predict(found) / measured - 1) for found in (one, two)]
    assert errors[1][1] < errors[0][1]
    assert errors[1][0] > errors[0][0]


WHOLE_OF_TWO = Efficiencies(product=0.9, memory=0.8, host_s=1e-5)
TIMES = st.floats(1e-6, 1.0)


@given(device_s=TIMES, host_s=TIMES, factor=st.floats(0.5, 2))
def test_pacing_takes_as_long_as_the_longer_and_less_than_both(device_s, host_s, factor):
    together = paced(device_s, host_s)
    assert max(device_s, host_s) * (1 - 1e-12) <= together <= device_s + host_s
    assert together == pytest.approx((device_s**3 + host_s**3) ** (1 / 3))
    assert together == paced(host_s, device_s)
    assert paced(factor * device_s, factor * host_s) == pytest.approx(factor * together)
    assert paced(device_s, 0.0) == device_s
    assert paced(0.0, 0.0) == 0.0


def test_kernels_of_a_layer_are_those_of_its_ops():
    ops = layer_ops(GPT, SETUP, 0)
    parts = {part: count_kernels(op for op in ops if op.part == part) for part in ("forward", "weight_gradient")}
    # Four products with parameters, two of attention; softmax and its dropout, heads, activation, two norms, residuals.
    assert parts == {"forward": 6 + 4 + 2 + 2, "weight_gradient": 4 * 4}
    # The products' inputs once, both inputs of attention's, the passes twice and the norms four times.
    assert count_kernels(op for op in ops if op.part == "input_gradient") == 4 + 2 * 2 + 2 * 4 + 2 * 4 + 2 * 2
    sent = layer_ops(GPT, replace(SETUP, tp=2), 0)
    assert count_kernels(sent) == count_kernels(ops) + 4


@pytest.mark.parametrize(("tp", "size", "fused"), [(1, 1, True), (4, 1, True), (8, 1, False), (8, 2, True)])
def test_a_softmax_of_odd_batches_is_not_fused(tp, size, fused):
    ops = layer_ops(GPT, replace(SETUP, tp=tp, microbatch_size=size), 0)
    assert any(op.name == "scores widened" for op in ops) is not fused


@given(num_bytes=st.integers(2**16, 2**32))
def test_what_the_cache_holds_moves_faster(num_bytes):
    at = prices(SETUP)
    plain = num_bytes / 2039e9
    assert plain / 3.5 * (1 - 1e-6) <= at.pass_seconds(num_bytes) - LAUNCH_S <= plain
    assert at.pass_seconds(num_bytes + 2**10) > at.pass_seconds(num_bytes)
    if num_bytes > 40 * 2**20:
        assert plain - (at.pass_seconds(num_bytes) - LAUNCH_S) == pytest.approx(40 * 2**20 / 2039e9 * 2.5 / 3.5)


def test_products_do_not_outrun_what_is_sustained():
    at = prices(SETUP)
    large = next(
        op for op in layer_ops(replace(GPT, hidden=16384, head_dim=1024, ffn=65536), SETUP, 0) if op.name == "up"
    )
    assert large.flops / at.seconds(large) == pytest.approx(258e12, rel=1e-6)
    assert replace(at, by_datasheet=True).seconds(large) == pytest.approx(large.flops / 312e12 + LAUNCH_S)


def test_habits_of_software_show_in_a_layer():
    setup = replace(SETUP, tp=8, sequence_parallel=True, recompute="full", precision="fp8")
    plain = replace(find_software("torchtitan FSDP2"), compiled=True)
    at = prices(setup, replace(WHOLE, host_s=1e-3), kind="8xH100")

    def total(**habits):
        layer = predict_layer(GPT, at, replace(plain, **habits))
        return layer.forward_s + layer.input_gradient_s + layer.weight_gradient_s

    assert total(compiled=False) > 2 * total()
    assert total(async_tensor_parallel=True) < total()
    assert total(regathers_inputs=True) > total()
    assert total(gathers_in_8_bits=False) > total()
    assert total(stops_early=False) > total()
    down = next(op for op in layer_ops(GPT, setup, 0) if op.name == "down")
    assert total(stops_early=False) - total() > at.seconds(down)


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_exchange_gradients_after_the_last_microbatch(zero):
    setup = replace(SETUP, dp=8, zero=zero)
    at, moved = prices(setup), 2 * count_parameters(GPT, setup, 0).dense
    found = predict_step(GPT, at, MEGATRON)
    op = "reduce_scatter" if zero else "all_reduce"
    assert found.stages[0].sum_s == pytest.approx(at.collective_seconds("data", op, moved))
    assert found.stages[0].gather_s == pytest.approx(at.collective_seconds("data", "all_gather", moved) * zero)
    assert (found.num_buckets, found.overlaps, found.shards) == (1, False, zero == 1)
    beside = predict_step(GPT, at, replace(MEGATRON, hidden_gradients="always"))
    assert beside.overlaps
    assert beside.num_buckets == -(-moved // (25 * 2**20))
    for alone in (replace(SETUP, zero=zero), replace(setup, zero=3)):
        assert predict_step(GPT, prices(alone), MEGATRON).num_buckets == 0


def test_of_an_expert_there_are_fewer_replicas():
    shape = replace(GPT, experts=Experts(num_experts=8, top_k=2, ffn=2048), gated=True)
    everywhere, spread = replace(SETUP, dp=8, zero=1), replace(SETUP, dp=8, ep=8, zero=1)
    dense = count_parameters(shape, spread, 0).dense
    at = prices(spread)
    found = predict_step(shape, at, MEGATRON).stages[0]
    assert found.sum_s == pytest.approx(at.collective_seconds("data", "reduce_scatter", 2 * dense))
    assert found.sum_s < predict_step(shape, prices(everywhere), MEGATRON).stages[0].sum_s
    # Their states are the same number on every rank, whoever shares them.
    alike = predict_step(shape, prices(everywhere), MEGATRON).stages[0].optimizer_s
    assert found.optimizer_s == pytest.approx(alike, rel=1e-6)


def test_gathers_and_scatters_are_hidden_by_some_software():
    setup = replace(SETUP, dp=8, zero=3)
    hidden, shown = (step(setup, software=replace(MEGATRON, hidden_gradients=when)) for when in ("always", "never"))
    assert shown > hidden


def test_what_an_optimizer_moves_is_that_of_the_software():
    at, parameters = prices(SETUP), count_parameters(GPT, SETUP, 0).dense
    software = replace(MEGATRON, optimizer_bytes=30)
    assert MEGATRON.clips("1f1b")
    assert not software.clips("1f1b")
    assert predict_step(GPT, at, software).stages[0].optimizer_s == pytest.approx(at.pass_seconds(30 * parameters))


def test_gradients_of_a_first_microbatch_need_not_be_added():
    added = 3 * 2 * layer_parameters(GPT, SETUP, 0)
    for count, share in ((1, 0.0), (8, 7 / 8)):
        at = prices(replace(SETUP, num_microbatches=count))
        always, later = (
            predict_layer(GPT, at, replace(MEGATRON, fused_accumulation=False, adds_first=first))
            for first in (True, False)
        )
        saved = always.weight_gradient_s - later.weight_gradient_s
        assert saved == pytest.approx((1 - share) * at.pass_seconds(added), rel=1e-6)


def test_scores_are_read_more_often_without_a_fused_softmax():
    fused, parted = (
        sum(op.num_bytes for op in layer_ops(GPT, replace(SETUP, fused_softmax=fuses), 0) if op.name == "softmax")
        for fuses in (True, False)
    )
    scores = 4 * 16 * 1024**2
    assert (fused, parted) == (2 * (2 + 3) * scores, 2 * (4 + 5) * scores)


# What Alpa's artifact says that its mixtures of experts multiply and add, 1e12 FLOPs: hidden, heads, experts.
@pytest.mark.parametrize(
    ("hidden", "heads", "experts", "counted"),
    [(1024, 32, 8, 22.6632), (1280, 40, 16, 33.1419), (1536, 24, 16, 45.5425), (1536, 24, 32, 45.5489)],
)
def test_products_of_experts_with_capacity_are_those_of_gshard(hidden, heads, experts, counted):
    routed = Experts(num_experts=experts, top_k=2, ffn=8 * hidden, period=2, gated=False, group=1024)
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": hidden // heads, "hidden": hidden, "ffn": 8 * hidden}
    shape = replace(GPT, layers=8, experts=routed, **sizes)
    setup = replace(SETUP, microbatch_size=8, recompute="full")
    layers = [op for layer in range(8) for op in layer_ops(shape, setup, layer)]
    ops = [*layers, *recomputed_ops(layers, "full"), *head_ops(shape, setup)]
    ops += embedding_ops(shape, setup, by_products=True)
    assert sum(op.count * op.flops for op in ops) / 1e12 == pytest.approx(counted, rel=1e-4)


# What Alpa's artifact says of its residual networks: channels, parameters in 1e9, products of a step in 1e12 FLOPs.
@pytest.mark.parametrize(
    ("channels", "parameters", "counted"),
    [(160, 0.254123, 7.6733), (224, 0.495046, 15.0184), (320, 1.005653, 30.6170), (448, 1.965011, 59.9665)],
)
def test_convolutions_are_those_of_a_wide_residual_network(channels, parameters, counted):
    shape = ResidualShape(blocks=(3, 4, 6, 3), channels=channels, width=2, image=224, classes=1024)
    assert shape.num_parameters / 1e9 == pytest.approx(parameters, abs=1e-6)
    ops = residual_ops(shape, replace(SETUP, microbatch_size=32))
    # XLA does not count products with the zeros around an image.
    assert counted <= sum(op.flops for op in ops) / 1e12 <= 1.05 * counted
    split = residual_ops(shape, replace(SETUP, microbatch_size=16, dp=2))
    assert sum(op.flops for op in split) == sum(op.flops for op in ops) / 2
    assert [op.group for op in ops if op.group] == []
    assert len([op for op in split if op.group == "data"]) == 2 * len(shape.convolutions)


def test_messages_slow_down_the_work_that_they_run_beside():
    software = find_software("PyTorch FSDP")
    setup = replace(SETUP, dp=8, zero=3, microbatch_size=16)
    at = prices(setup)
    moved = count_parameters(GPT, setup, 0).dense
    gather = at.collective_seconds("data", "all_gather", 2 * moved)
    scatter = at.collective_seconds("data", "reduce_scatter", 4 * moved)
    alone = predict_step(GPT, prices(replace(setup, dp=1)), software).stages[0]
    # All of it is shorter than the work; of an A100's 108 multiprocessors NCCL has 24.
    added = (24 / 108) * (2 * gather + scatter) + (gather + scatter) / GPT.layers
    assert predict_step(GPT, at, software).stages[0].seconds - alone.seconds == pytest.approx(added)
    once = replace(setup, pp=2)
    often, seldom = (
        predict_step(GPT, prices(once), replace(software, gathers_once_in_pipelines=keeps)).stages[0].seconds
        for keeps in (False, True)
    )
    assert seldom < often


def test_messages_that_are_gathered_take_longer():
    setup = replace(SETUP, tp=8, pp=2)
    sent, gathered = (
        predict_step(GPT, prices(setup), replace(MEGATRON, gathers_messages=gathers)).stages[0].transfer_s
        for gathers in (False, True)
    )
    gather = prices(setup).collective_seconds("tensor", "all_gather", 2 * setup.tokens * GPT.hidden)
    assert gathered - sent == pytest.approx(2 * gather)


def step(setup, efficiencies=WHOLE, software=MEGATRON):
    """Nothing beside anything else."""
    found = predict_step(GPT, prices(setup, efficiencies), software)
    after = max(found.num_buckets * (stage.sum_s + stage.gather_s) + stage.optimizer_s for stage in found.stages)
    return pipeline_seconds(found.stages, setup.num_microbatches, setup.schedule) + found.tied_s + after
