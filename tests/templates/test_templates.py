"""Graphs from sizes are those that capture makes of the same models: every op, shape, FLOP, saved tensor, parameter."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.capture import capture_model
from meshwright.cost.memory import weigh_stage
from meshwright.program import shard_graph
from meshwright.spec import Sharding, Workload, load_shipped_graph, slice_graph, with_recompute
from meshwright.spec.memory import SENT
from meshwright.templates import decoder_graph, residual_graph
from meshwright.templates.shapes import ExpertLayers, LatentAttention, ResidualShape
from meshwright.validation.step_plans import recompute_attention
from meshwright.zoo import GPTShape, MixtralShape, ResNetShape
from tests.templates.deepseek import DeepSeek
from tests.templates.sizes import LLAMA, gpt

MIXTRAL = replace(LLAMA, hidden=64, head_dim=16, ffn=96, experts=ExpertLayers(num_experts=4, top_k=2, ffn=96))


# tests/zoo/test_graphs.py compares the shipped graphs with those that capture makes now.
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gpt-tiny", lambda name: decoder_graph(gpt(4, 128, 4, 256, 128), 128, name=name)),
        ("gpt2-medium", lambda name: decoder_graph(gpt(24, 1024, 16, 50257, 1024), 1024, name=name)),
        ("llama-tiny", lambda name: decoder_graph(LLAMA, 128, name=name)),
        ("mixtral-tiny", lambda name: decoder_graph(MIXTRAL, 64, capacity_factor=1.25, name=name)),
        ("resnet50", lambda name: residual_graph(resnet((3, 4, 6, 3)), name=name)),
    ],
)
def test_a_graph_is_the_shipped_one(name, make):
    made, shipped = make(name), load_shipped_graph(name)
    for one, other in zip(made.ops, shipped.ops, strict=True):
        assert one == other
    assert made == shipped


def resnet(blocks, **changes):
    return replace(ResidualShape(blocks=blocks, channels=64, width=1, image=224, classes=1000), **changes)


def captured(shape, change=lambda _model: None):
    model = shape.build()
    change(model)
    inputs, targets = shape.batch()
    return capture_model(model, inputs, targets=targets, loss=shape.loss, name="made", verify=False).graph


def small_gpt(dropout=0.0):
    return GPTShape(
        source="",
        num_layers=2,
        width=32,
        num_heads=4,
        vocabulary=50,
        context=24,
        dropout=dropout,
        batch_size=2,
        sequence_length=16,
    )


def without_biases(model):
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            module.bias = None


def untied(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize(
    ("changes", "dropout", "change"),
    [
        ({"dropout": True}, 0.1, lambda _model: None),
        ({"biased": False}, 0.0, without_biases),
        ({"tied": False}, 0.0, untied),
    ],
)
def test_a_relative_of_gpt_is_what_capture_makes(changes, dropout, change):
    made = decoder_graph(gpt(2, 32, 4, 50, 24, **changes), 16, name="made")
    assert made == captured(small_gpt(dropout), change)


def widened(model):
    for block in model.blocks:
        old = block.convolution2
        wide = 2 * old.out_channels
        block.convolution2 = nn.Conv2d(old.in_channels, wide, 3, stride=old.stride, padding=1, bias=False)
        block.norm2 = nn.BatchNorm2d(wide)
        block.convolution3 = nn.Conv2d(wide, block.convolution3.out_channels, 1, bias=False)


def test_a_wide_residual_network_is_what_capture_makes():
    shape = ResNetShape(
        source="",
        block="bottleneck",
        blocks_per_stage=(1, 2),
        width=8,
        num_classes=10,
        batch_size=2,
        image_size=32,
    )
    made = residual_graph(resnet((1, 2), channels=8, width=2, image=32, classes=10), name="made")
    assert made == captured(shape, widened)


def test_a_deepseek_is_what_capture_makes():
    latent = LatentAttention(query_rank=16, kv_rank=12, content_dim=8, rotary_dim=4, value_dim=6)
    experts = ExpertLayers(num_experts=4, top_k=2, ffn=24, num_shared=2, num_dense_layers=1)
    shape = replace(MIXTRAL, layers=3, hidden=32, head_dim=8, kv_heads=4, ffn=80, experts=experts, latent=latent)
    own = MixtralShape(
        source="",
        num_layers=3,
        width=32,
        num_heads=4,
        num_key_value_heads=4,
        hidden_width=24,
        vocabulary=256,
        context=16,
        rope_base=10000.0,
        batch_size=2,
        sequence_length=16,
        num_experts=4,
        num_chosen=2,
        capacity_factor=1.0,
    )
    model = DeepSeek(own, latent, dense_width=80, num_shared=2)
    inputs, targets = own.batch()
    graph = capture_model(model, inputs, targets=targets, loss=own.loss, name="made", verify=False).graph
    made = decoder_graph(shape, 16, name="made")
    for one, other in zip(made.ops, graph.ops, strict=True):
        assert one == other
    assert made == graph


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(1024, 16), (6144, 64)]),
    st.sampled_from([1024, 2048]),
    st.booleans(),
)
def test_a_block_with_products_for_attention_keeps_what_korthikanti_et_al_say(batch, tensor, size, seq, selective):
    hidden, heads = size
    graph = decoder_graph(gpt(3, hidden, heads, 8, seq, dropout=True), seq, fused_attention=False)
    graph = shard_graph(graph, Sharding(tensor=tensor)).graph
    block = slice_graph(graph, [(0, 2), (2, 3), (3, 5)])[1]
    graph = with_recompute(graph, recompute_attention(graph) if selective else ())
    found = weigh_stage(graph, block, batch, Workload(global_batch=batch, precision="mixed"), device="cuda")
    kept = found.microbatch_bytes - found.phases.forward.after[SENT]
    # Equation 2 (MLSys 2023), without the scores where they are computed again; norms keep two numbers of each token.
    scores = 0 if selective else 5 * heads * seq / hidden
    expected = seq * batch * hidden * (10 + (24 + scores) / tensor)
    assert expected <= kept <= expected + 4 * 4 * seq * batch
    # The products of the two ways are the same.
    fused = decoder_graph(gpt(3, hidden, heads, 8, seq, dropout=True), seq)
    by_products = decoder_graph(gpt(3, hidden, heads, 8, seq, dropout=True), seq, fused_attention=False)
    assert fused.flops(1) == by_products.flops(1)
