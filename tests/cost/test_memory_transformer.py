"""A transformer's bytes from its sizes: against the formulas of papers and the sizes that models are known to have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.memory import predict_device_peak, saved_bytes
from meshwright.cost.memory.transformer import in_flight
from meshwright.cost.parameters import count_parameters
from meshwright.cost.transformer import (
    Experts,
    LatentAttention,
    TrainingSetup,
    TransformerError,
    TransformerShape,
    layers_of_stage,
)

ONE = TrainingSetup(seq=2048, microbatch_size=1, num_microbatches=1)
# Sizes from the models' own configuration files.
LLAMA_8B = TransformerShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
    gated=True,
    biased=False,
    root_norm=True,
    tied=False,
    dropout=False,
)
DEEPSEEK_V3 = TransformerShape(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=56,
    ffn=18432,
    vocab=129280,
    gated=True,
    biased=False,
    root_norm=True,
    tied=False,
    dropout=False,
    experts=Experts(num_experts=256, top_k=8, ffn=2048, num_shared=1, num_dense_layers=3),
    latent=LatentAttention(query_rank=1536, kv_rank=512, content_dim=128, rotary_dim=64, value_dim=128),
)


def gpt(layers, hidden, heads, vocab=51200, positions=2048):
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        max_positions=positions,
    )


def total(shape, setup=ONE):
    stages = [count_parameters(shape, setup, stage) for stage in range(setup.pp)]
    return sum(stage.dense + stage.experts for stage in stages)


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(1024, 16), (6144, 64)]),
    st.sampled_from([1024, 2048]),
    st.booleans(),
    st.booleans(),
)
def test_a_gpt_keeps_what_korthikanti_et_al_say(batch, tp, size, seq, parallel, selective):
    hidden, heads = size
    setup = TrainingSetup(
        seq=seq,
        microbatch_size=batch,
        num_microbatches=1,
        tp=tp,
        sequence_parallel=parallel,
        recompute="selective" if selective else "none",
        fused_attention=False,
    )
    scores = 0 if selective else 5 * heads * seq / hidden
    # Equations 2 and 4; 6 without the scores.
    shared = (34 + scores) / tp if parallel else 10 + (24 + scores) / tp
    assert sum(saved_bytes(gpt(1, hidden, heads), setup, layer=0).values()) == pytest.approx(
        seq * batch * hidden * shared
    )


def test_known_models_have_their_known_sizes():
    # Megatron's formula: 12·l·h²·(1 + 13/(12h) + (V + s)/(12·l·h)), without the last norm.
    layers, hidden, vocab, seq = 96, 12288, 51200, 2048
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))
    assert total(gpt(layers, hidden, 96)) == pytest.approx(formula + 2 * hidden, rel=1e-12)
    # Llama 3.1 8B has 8,030,261,248 parameters (its model card's file sizes), DeepSeek-V3 671 billion (its paper).
    assert total(LLAMA_8B) == 8_030_261_248
    assert total(DEEPSEEK_V3) == pytest.approx(671e9, rel=1e-3)


@pytest.mark.parametrize("shape", [LLAMA_8B, replace(LLAMA_8B, layers=30), DEEPSEEK_V3])
def test_stages_share_the_layers_and_devices_the_parameters(shape):
    for pp, chunks in [(1, 1), (4, 1), (4, 2), (7, 3)]:
        setup = replace(ONE, pp=pp, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
        held = [layer for stage in range(pp) for layer in layers_of_stage(shape, setup, stage)]
        assert sorted(held) == list(range(shape.layers))
        assert total(shape, setup) == total(shape)
    halves = count_parameters(shape, replace(ONE, tp=2), 0)
    whole = count_parameters(shape, ONE, 0)
    assert halves.head == whole.head / 2
    assert whole.dense / 2 <= halves.dense < 0.54 * whole.dense
    if shape.experts is not None:
        assert count_parameters(shape, replace(ONE, dp=8, ep=8), 0).experts == whole.experts / 8


def count_by_running(pp, chunks, microbatches):
    """The most chunks that the first stage holds in Megatron's order: warm-up, then one backward per forward."""
    warm = min(2 * (pp - 1) + (chunks - 1) * pp if chunks > 1 else pp - 1, microbatches * chunks)
    held = most = done = 0
    for step in range(microbatches * chunks):
        held += 1
        most = max(most, held)
        if step >= warm:
            held, done = held - 1, done + 1
    return most / chunks


@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 64))
def test_microbatches_in_flight_are_those_of_the_order_that_runs(pp, chunks, microbatches):
    setup = replace(ONE, pp=pp, chunks=chunks, num_microbatches=microbatches, schedule="interleaved")
    assert in_flight(setup, 0) == pytest.approx(count_by_running(pp, chunks, microbatches))
    assert in_flight(replace(setup, schedule="gpipe", chunks=1), 0) == microbatches
    if chunks > 1 and microbatches * chunks >= pp * (chunks + 1):
        # Korthikanti et al., section 4.2.3.
        assert in_flight(setup, 0) / pp == pytest.approx(1 + (pp - 1) / (pp * chunks))


@pytest.mark.parametrize("framework", ["megatron", "fsdp2"])
def test_more_sharding_never_needs_more_and_parts_add_up(framework):
    base = TrainingSetup(seq=4096, microbatch_size=1, num_microbatches=4, dp=8, zero=1)
    peaks = {}
    for name, setup in {
        "base": base,
        "more ranks": replace(base, dp=64),
        "recompute": replace(base, recompute="full"),
        "context": replace(base, cp=4, dp=8),
        "longer": replace(base, seq=8192),
    }.items():
        peak = predict_device_peak(LLAMA_8B, setup, framework, fused_loss=True)
        assert sum(peak.parts.values()) == peak.allocated_bytes <= peak.reserved_bytes
        assert peak.owner in peak.parts
        peaks[name] = peak.allocated_bytes
    assert peaks["more ranks"] < peaks["base"]
    assert peaks["recompute"] < peaks["base"]
    assert peaks["context"] < peaks["base"] < peaks["longer"]


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(TransformerError, match="layers is 0"):
        replace(LLAMA_8B, layers=0)
    with pytest.raises(TransformerError, match="cannot share"):
        replace(LLAMA_8B, kv_heads=5)
    with pytest.raises(TransformerError, match="cannot be split"):
        replace(ONE, seq=2049, cp=2)
    with pytest.raises(TransformerError, match="'nonsense' is no schedule"):
        replace(ONE, schedule="nonsense")
    with pytest.raises(TransformerError, match="2 chunks per stage cannot run as '1f1b'"):
        replace(ONE, pp=2, chunks=2)
    with pytest.raises(TransformerError, match=r"ep = 3 does not divide the 8 devices"):
        replace(ONE, dp=4, cp=2, ep=3)


def test_a_head_of_keys_and_values_is_on_every_device_of_a_wider_group():
    """Two heads of keys and values over four devices: each holds one, in its weights and in what it keeps."""
    shape = replace(LLAMA_8B, kv_heads=2, heads=8, head_dim=64)
    over = {tp: replace(ONE, tp=tp) for tp in (2, 4)}
    assert (shape.hidden, (4 + 2) * 64) in count_parameters(shape, over[2], 0).products
    assert (shape.hidden, (2 + 2) * 64) in count_parameters(shape, over[4], 0).products
    kept = {tp: saved_bytes(shape, over[tp], 0)["queries, keys and values"] for tp in over}
    assert kept[2] * (2 + 2) == kept[4] * (4 + 2)


def test_states_of_experts_are_shared_by_the_ranks_that_have_them():
    shape = replace(LLAMA_8B, experts=Experts(num_experts=8, top_k=2, ffn=1024))
    held = count_parameters(shape, replace(ONE, dp=8, ep=4), 0)
    assert held.share(replace(ONE, dp=8, ep=4)) == held.dense // 8 + held.experts // 2
